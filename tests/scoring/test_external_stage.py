"""A stage whose work consumers outside the run do: executor, storage unit and sockets are real."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.core.errors import NotStored, UserCodeError
from llamarl.core.records import (
    NO_VERSION,
    PROMPT_IDS,
    RESPONSE_IDS,
    TOKEN_VERSIONS,
    Prompt,
    StageItem,
    StageResult,
    StageStatus,
)
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.external import ExternalSpec, ExternalWorker
from llamarl.scoring.loader import SOCKETS, StageBatch, StageLoader
from llamarl.scoring.stages import External, Stage
from llamarl.storage.client import Store, Unit
from llamarl.storage.columns import Column
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.places import TOOLS_RECIPE

pytestmark = pytest.mark.full

PROMPT = Prompt(prompt_id=3, text="what?", token_ids=(1, 2), fields={"answer": "4"})
READS = ("prompt", RESPONSE_IDS)
NUM_ROWS = 40


class Run:
    """The executors of a run with one external stage, in this process."""

    def __init__(self, folder: Path, stage: Stage, tokenizer: str = "") -> None:
        self.folder = folder
        socket = str(folder / "units" / "0")
        spec = StorageSpec(
            unit=0,
            archive_folder=None,
            socket=socket,
            spill_folder=str(folder / "spill"),
            max_bytes=0,
        )
        place: dict[str, Any] = {"rank": 0, "num_ranks": 1, "spans": Spans("x", None)}
        self.unit = StorageWorker(spec, **place)
        self.store = Store([Unit("storage-0", self.unit, socket)])
        self.stage = ExternalWorker(
            ExternalSpec(
                stage=stage,
                socket=str(folder / SOCKETS / stage.name),
                units=(("storage-0", socket),),
                tokenizer=tokenizer,
                storage=self.store,
            ),
            **place,
        )

    async def __aenter__(self) -> Run:
        await self.unit.start()
        await self.stage.start()
        lengths = [1 + 7 * i % 40 for i in range(NUM_ROWS)]
        cells = [np.arange(length, dtype=np.int32) for length in lengths]
        prompts = [np.array(PROMPT.token_ids, np.int32)] * NUM_ROWS
        rows = list(range(NUM_ROWS))
        await self.store.write(rows, {RESPONSE_IDS: cells, PROMPT_IDS: prompts})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stage.close()
        await self.unit.close()

    async def written(self, name: str, row_ids: list[int]) -> list[list[float]]:
        cells = (await self.store.read(row_ids, [name]))[name]
        return [cell.tolist() for cell in cells]


def make(external: External | None = None, reads: tuple[str, ...] = READS, **more: Any) -> Stage:
    options = {"writes": ["quality"], "timeout_s": 60.0, "max_failure_rate": 1.0, **more}
    return Stage("judge", external or External(), reads, **options)


def alone(first: int = 0, end: int = NUM_ROWS) -> list[StageItem]:
    return [((row_id,), PROMPT) for row_id in range(first, end)]


def lengths_of(batch: StageBatch) -> list[float]:
    return [float(len(ids)) for ids in batch[RESPONSE_IDS]]


def consume(
    folder: Path, batches: list[list[int]], work: Callable[[StageBatch], None], **options: Any
) -> threading.Thread:
    """A consumer in a thread, until the run ends."""

    def take() -> None:
        with StageLoader(folder, "judge", **options) as loader:
            for batch in loader:
                batches.append(batch.row_ids)
                work(batch)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def finish(batch: StageBatch) -> None:
    batch.finish(quality=lengths_of(batch))


def look(batch: StageBatch) -> None:
    """Finish nothing."""


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
        consume(tmp_path, batches, finish)
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
        consume(tmp_path, batches, finish)
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
        consume(tmp_path, [], finish)
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
        consume(tmp_path, batches, look)
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


async def test_data_ranks_share_each_batch_and_peers_of_a_rank_see_the_same(tmp_path: Path) -> None:
    external = External(sampler="token_balanced", num_data_ranks=2, num_peers=2)
    seen: dict[tuple[int, int], list[list[int]]] = {}

    async with Run(tmp_path, make(external)) as running:
        for rank in range(2):
            for peer in range(2):
                seen[rank, peer] = []
                where = {"data_rank": rank, "peer": peer, "batch_size": 5, "prefetch": 1}
                consume(tmp_path, seen[rank, peer], look if peer else finish, **where)
        await running.stage.process(alone(0, 39))
        while len({len(batches) for batches in seen.values()}) > 1:
            await asyncio.sleep(0.01)  # a peer that only looks may be behind
    assert seen[0, 0] == seen[0, 1]
    assert seen[1, 0] == seen[1, 1]
    assert sorted(i for batch in seen[0, 0] + seen[1, 0] for i in batch) == list(range(39))
    tokens = [sum(1 + 7 * i % 40 for i in batch) for batch in (seen[0, 0][0], seen[1, 0][0])]
    assert abs(tokens[0] - tokens[1]) <= 6, "nearly the same cost"
    assert [len(batch) for batch in seen[0, 0]] == [5, 5, 5, 4, 0]
    assert [len(batch) for batch in seen[1, 0]] == [5, 5, 5, 4, 1]


async def test_a_peer_that_missed_a_batch_raises_instead_of_going_on_with_the_next(
    tmp_path: Path,
) -> None:
    seen: list[list[int]] = []

    async with Run(tmp_path, make(External(num_peers=2))) as running:
        consume(tmp_path, seen, finish, batch_size=5, prefetch=1)
        await running.stage.process(alone(0, 5))
        await running.store.retire([*range(5)], {"outcome": "trained"})
        await running.stage.process(alone(5, 10))
        late = await asyncio.to_thread(StageLoader, tmp_path, "judge", batch_size=5, peer=1)
        with pytest.raises(NotStored, match="row 0 is not stored"):
            await asyncio.to_thread(next, iter(late))
        await asyncio.to_thread(late.close)
    assert seen == [[*range(5)], [*range(5, 10)]]


async def test_when_a_data_rank_ends_all_begin_again_and_no_rollout_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = {"batch_size": 4, "prefetch": 1}

    async def start(data_rank: int) -> StageLoader:
        return await asyncio.to_thread(StageLoader, tmp_path, "judge", data_rank=data_rank, **where)

    async with Run(tmp_path, make(External(num_data_ranks=2), timeout_s=600.0)) as running:
        working = asyncio.create_task(running.stage.process(alone(0, 24)))
        first, second = await start(0), await start(1)
        batch = await asyncio.to_thread(next, iter(first))
        await asyncio.to_thread(batch.finish, {"quality": lengths_of(batch)})
        await asyncio.to_thread(second.close)  # with what it had
        with pytest.raises(RuntimeError, match="stage judge: a process of its consumer is gone"):
            await asyncio.to_thread(drain, first)
        await asyncio.to_thread(first.close)
        seen: list[list[int]] = []
        for data_rank in range(2):
            consume(tmp_path, seen, finish, data_rank=data_rank, **where)
        results = await asyncio.wait_for(working, 30)
        assert [result.numbers["quality"] for result in results] == [
            1.0 + 7 * i % 40 for i in range(24)
        ]
        again = sorted(row_id for row_ids in seen for row_id in row_ids)
        assert again == sorted({*range(24)} - {*batch.row_ids})
    assert "a process of its consumer has ended" in caplog.text


def drain(loader: StageLoader) -> None:
    for _ in loader:
        pass


async def test_a_data_rank_that_never_comes_is_waited_for_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Run(tmp_path, make(External(num_data_ranks=2), timeout_s=0.5)) as running:
        consume(tmp_path, [], finish, batch_size=4, prefetch=1)
        working = asyncio.create_task(running.stage.process(alone(0, 8)))
        while "has not asked for batch 0" not in caplog.text:
            await asyncio.sleep(0.01)
        consume(tmp_path, [], finish, batch_size=4, prefetch=1, data_rank=1)
        assert len(await asyncio.wait_for(working, 30)) == 8
