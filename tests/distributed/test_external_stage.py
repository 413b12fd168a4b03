"""A stage whose work consumers outside the run do: executor, storage unit and sockets are real."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from llamarl.core.errors import UserCodeError
from llamarl.core.records import (
    NO_VERSION,
    RESPONSE_IDS,
    TOKEN_VERSIONS,
    Prompt,
    StageResult,
    StageStatus,
)
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.loader import StageBatch, StageLoader
from llamarl.storage.columns import Column
from tests.distributed.external import NUM_ROWS, PROMPT, Run, alone, consume, lengths_of, make
from tests.places import TOOLS_RECIPE


async def test_two_consumers_finish_every_rollout_once_and_what_they_write_is_stored(
    tmp_path: Path,
) -> None:
    taken: tuple[list[list[int]], list[list[int]]] = [], []
    threads = []

    def work(batch: StageBatch) -> None:
        assert batch["prompt"] == [PROMPT] * len(batch.row_ids)
        drop = {row_id: "unlucky" for row_id in batch.row_ids if row_id == 13}
        batch.finish(quality=lengths_of(batch), drop=drop)

    async with Run(tmp_path, make()) as running:
        threads.extend(consume(tmp_path, each, work, batch_size=3) for each in taken)
        results = [*await running.stage.process(alone(0, 25))]
        results += await running.stage.process(alone(25))
        assert [result.row_id for result in results] == list(range(NUM_ROWS))
        assert [result.row_id for result in results if result.reason] == [13]
        kept = [i for i in range(NUM_ROWS) if i != 13]
        assert await running.written("quality", kept) == [[1.0 + 7 * i % 40] for i in kept]
        assert results[5].numbers == {"quality": 36.0}
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a loader ends with the run"
    both = [row_id for each in taken for batch in each for row_id in batch]
    assert sorted(both) == list(range(NUM_ROWS))
    assert all(taken), "both had some"


async def test_prompts_and_reasons_of_a_batch_may_be_longer_than_a_packet(tmp_path: Path) -> None:
    batches: list[list[int]] = []
    long = Prompt(prompt_id=3, text="what? " * 4000, token_ids=(1, 2), fields={"answer": "4"})

    def work(batch: StageBatch) -> None:
        assert batch["prompt"] == [long] * len(batch.row_ids)
        reasons = {row_id: f"{row_id}" * 3000 for row_id in batch.row_ids}
        batch.finish(quality=lengths_of(batch), drop=reasons)

    async with Run(tmp_path, make()) as running:
        consume(tmp_path, batches, work, batch_size=NUM_ROWS)
        results = await running.stage.process([((row,), long) for row in range(NUM_ROWS)])
        assert [result.reason for result in results] == [f"{row}" * 3000 for row in range(NUM_ROWS)]
    assert batches == [list(range(NUM_ROWS))]


TAKE_AND_HANG = """
import sys, time
from llamarl.scoring.loader import StageLoader
for batch in StageLoader(sys.argv[1], "judge", batch_size=10, prefetch=1):
    print(*batch.row_ids, flush=True)
    time.sleep(60)
"""


async def test_what_a_killed_consumer_had_taken_goes_to_another_and_nothing_is_lost_or_twice(
    tmp_path: Path,
) -> None:
    batches: list[list[int]] = []

    async with Run(tmp_path, make(timeout_s=600.0)) as running:
        working = asyncio.create_task(running.stage.process(alone()))
        command = [sys.executable, "-c", TAKE_AND_HANG, str(tmp_path)]
        doomed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert doomed.stdout is not None
        had = await asyncio.to_thread(doomed.stdout.readline)
        assert len(had.split()) == 10
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        consume(tmp_path, batches, lambda batch: batch.finish(quality=lengths_of(batch)))
        results = await working
        assert [result.row_id for result in results] == list(range(NUM_ROWS))
        assert {result.status for result in results} == {StageStatus.OK}
    assert sorted(row_id for batch in batches for row_id in batch) == list(range(NUM_ROWS))


TAKE_AND_WAIT = """
import sys
from llamarl.scoring.loader import StageLoader
for batch in StageLoader(sys.argv[1], "judge", batch_size=10):
    batch.finish(quality=[1.0] * len(batch.row_ids))
    print(*batch.row_ids, flush=True)
"""


async def test_a_consumer_that_died_while_it_waited_gets_nothing_more(tmp_path: Path) -> None:
    batches: list[list[int]] = []

    async with Run(tmp_path, make(timeout_s=600.0)) as running:
        command = [sys.executable, "-c", TAKE_AND_WAIT, str(tmp_path)]
        doomed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        await running.stage.process(alone(0, 10))
        assert doomed.stdout is not None
        assert await asyncio.to_thread(doomed.stdout.readline)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        consume(tmp_path, batches, lambda batch: batch.finish(quality=lengths_of(batch)))
        results = await asyncio.wait_for(running.stage.process(alone(10)), 10)
        assert {result.status for result in results} == {StageStatus.OK}
    assert sorted(row_id for batch in batches for row_id in batch) == list(range(10, NUM_ROWS))


CLOSE = """
import sys, threading
from llamarl.scoring.loader import StageLoader
loader = StageLoader(sys.argv[1], "judge", batch_size=10, prefetch=1)
seen = []
thread = threading.Thread(target=lambda: seen.extend(loader))
thread.start()
while len(seen) < 2:
    thread.join(0.01)
loader.close()
loader.close()
thread.join()
assert not list(loader)
try:
    seen[0].finish(quality=[1.0] * 10)
except ConnectionError as error:
    print(error, len(seen))
left_open = StageLoader(sys.argv[1], "judge")
"""


async def test_a_closed_loader_leaves_nothing_and_ends_whoever_iterates(tmp_path: Path) -> None:
    async with Run(tmp_path, make(timeout_s=600.0)) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 20)))
        command = [sys.executable, "-W", "default", "-c", CLOSE, str(tmp_path)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=50
        )
        assert done.stdout == "the loader of stage judge is closed 2\n"
        assert done.stderr == "", "no task, socket or event loop is left"
        consume(tmp_path, [], lambda batch: batch.finish(quality=lengths_of(batch)))
        assert len(await asyncio.wait_for(working, 10)) == 20, "others get what it had"


async def test_what_is_finished_too_late_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with Run(tmp_path, make(timeout_s=0.3)) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 4)))
        slow = await asyncio.to_thread(StageLoader, tmp_path, "judge", prefetch=1)
        late = await asyncio.to_thread(next, iter(slow))
        batch = await asyncio.to_thread(next, iter(slow))  # the same rows, after their time
        assert batch.row_ids == late.row_ids
        with pytest.raises(ValueError, match=r"must be finished once, within 0\.3 s \(timeout_s"):
            await asyncio.to_thread(late.finish, {"quality": [7.0] * 4})
        await asyncio.to_thread(batch.finish, {"quality": [1.0] * 4})
        results = await working
        assert [result.numbers for result in results] == [{"quality": 1.0}] * 4
        assert await running.written("quality", [0, 1, 2, 3]) == [[1.0]] * 4
        await asyncio.to_thread(slow.close)


async def test_a_consumer_meets_the_end_of_a_run_without_an_error(tmp_path: Path) -> None:
    seen: list[int] = []
    is_over, has_ended = threading.Event(), threading.Event()

    def judge() -> None:
        for batch in StageLoader(tmp_path, "judge", batch_size=4):
            seen.extend(batch.row_ids)
            if 8 in batch.row_ids:
                is_over.wait(30)
            batch.finish(quality=[1.0] * 4)
        has_ended.set()

    async with Run(tmp_path, make()) as running:
        early = asyncio.create_task(running.stage.process(alone(0, 4)))
        await asyncio.sleep(0)
        await running.store.retire([0, 1, 2, 3], {"outcome": "unused"})
        threading.Thread(target=judge, daemon=True).start()
        assert len(await running.stage.process(alone(4, 8))) == 4
        late = asyncio.create_task(running.stage.process(alone(8, 12)))
        while 8 not in seen:
            await asyncio.sleep(0.01)
        for unused in (early, late):
            unused.cancel()
    is_over.set()
    assert has_ended.wait(30), "what it held counts for nothing, and there is no more"
    assert seen == [*range(4, 12)]


async def test_a_consumer_that_never_finishes_makes_its_rollouts_hung_and_then_ends_the_run(
    tmp_path: Path,
) -> None:
    batches: list[list[int]] = []

    async with Run(tmp_path, make(timeout_s=0.1, max_failure_rate=0.5)) as running:
        consume(tmp_path, batches, lambda batch: None)
        results = await running.stage.process(alone(0, 4))
        assert {result.status for result in results} == {StageStatus.HUNG}
        assert "must be finished within 0.1 s (timeout_s), was not 3 times" in results[0].error
        await running.stage.process(alone(4, 40))
        with pytest.raises(UserCodeError, match="of stage judge calls may fail"):
            await running.stage.process(alone())


async def test_what_cannot_be_stored_goes_to_others_too_and_then_counts_as_failed(
    tmp_path: Path,
) -> None:
    errors: list[str] = []

    def work(batch: StageBatch) -> None:
        try:
            batch.finish(quality=lengths_of(batch))
        except RuntimeError as error:
            errors.append(str(error))

    async with Run(tmp_path, make()) as running:
        await running.store.write([2], {"quality": [np.ones(1)]})
        consume(tmp_path, [], work)
        results = await running.stage.process(alone(0, 4))
        assert {result.status for result in results} == {StageStatus.HUNG}
        while len(errors) < 3:  # the last one may still be on its way
            await asyncio.sleep(0.01)
    assert len(errors) == 3
    assert all("quality" in error for error in errors)


async def test_groups_come_whole_and_a_column_may_have_an_entry_per_token(tmp_path: Path) -> None:
    writes = [Column("marks", "float32", "response"), "quality"]
    batches: list[list[int]] = []

    def work(batch: StageBatch) -> None:
        assert batch.groups == [4] * len(batch.groups)
        marks = [np.full(len(ids), 0.5) for ids in batch[RESPONSE_IDS]]
        batch.finish(marks=marks, quality=[1.0] * len(batch.row_ids))

    async with Run(tmp_path, make(per="group", writes=writes)) as running:
        consume(tmp_path, batches, work, batch_size=2)
        groups = [(tuple(range(i, i + 4)), PROMPT) for i in range(0, 20, 4)]
        results: list[StageResult] = await running.stage.process([*groups])
        assert [result.row_id for result in results] == list(range(20))
        assert await running.written("marks", [3]) == [[0.5] * 22]
    assert [len(batch) for batch in batches] == [8, 8, 4]


async def test_the_completion_of_an_episode_is_its_last_turn(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOOLS_RECIPE / "checkpoint")
    first, observed, last = (tokenizer.encode(text) for text in ("12*3", "36", "it is 36"))
    episode = np.array([*first, *observed, *last], np.int32)
    versions = np.array([4] * len(first) + [NO_VERSION] * len(observed) + [5] * len(last), np.int32)
    completions: list[str] = []

    def work(batch: StageBatch) -> None:
        completions.extend(batch["completion"])
        batch.finish(quality=[1.0] * len(batch.row_ids))

    stage = make(reads=("prompt", "completion"))
    async with Run(tmp_path, stage, tokenizer=str(TOOLS_RECIPE / "checkpoint")) as running:
        plain = np.array(first, np.int32)
        cells = {RESPONSE_IDS: [plain, episode], TOKEN_VERSIONS: [np.full_like(plain, 4), versions]}
        await running.store.write([100, 101], cells)
        consume(tmp_path, [], work)
        await running.stage.process(alone(100, 102))
    assert completions == ["12*3", "it is 36"]


async def test_wrong_results_are_named_before_anything_is_handed_over(tmp_path: Path) -> None:
    async with Run(tmp_path, make()) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 2)))
        loader = await asyncio.to_thread(StageLoader, tmp_path, "judge")
        batch = await asyncio.to_thread(next, iter(loader))
        for columns, line in (
            ({"qualty": [1.0, 1.0]}, r"columns must be \['quality'\], got \['qualty'\]"),
            ({"quality": [1.0]}, "quality must have 2 entries, got 1"),
            ({"quality": [1.0, [1.0, 2.0]]}, "quality must have one number per rollout"),
        ):
            with pytest.raises(ValueError, match=line):
                batch.finish(columns)
        await asyncio.to_thread(batch.finish, {"quality": [0.0, 1.0]})
        assert len(await working) == 2
        with pytest.raises(ValueError, match="a batch must be finished once"):
            await asyncio.to_thread(batch.finish, {"quality": [0.0, 1.0]})
        await asyncio.to_thread(loader.close)
    with pytest.raises(ValueError, match="stage judge must run External in the run, got no socket"):
        StageLoader(tmp_path, "judge", wait_s=0)
