"""What every generator executor promises, whatever engine it runs.

A test module that asks these questions of an engine imports them all (`from ... import *`) and has
a fixture `engine_case` that returns an EngineCase.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from llamarl.core.errors import StaleVersion
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    RolloutInfo,
)
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
from llamarl.model.inventory import parameter_shapes
from tests.fakes import WatchedStorage
from tests.generator.generator_replica import (
    EngineCase,
    Replica,
    assert_same,
    collect,
    connect,
    drive,
    gather,
    make,
    make_source,
    publish,
    request,
)
from tests.storage.stored_rows import NAMES


def test_columns_of_a_row_are_stored_when_collect_returns_it(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i, max_tokens=5 + i) for i in range(9)])
        rows: list[RolloutInfo] = []
        while len(rows) < 9:
            for row in await collect(generator):
                rows.append(row)
                assert storage.rows[row.row_id].keys() == {*NAMES}
        for row in rows:
            assert row.num_tokens == 5 + row.row_id
            assert row.finish_reason is FinishReason.LENGTH
            assert row.replica == 3
            assert [(s.version, s.num_tokens) for s in row.spans] == [(0, row.num_tokens)]
            cell = storage.rows[row.row_id]
            assert cell[PROMPT_IDS].tolist() == [5, 6, 7]
            assert cell[PROMPT_IDS].dtype == cell[RESPONSE_IDS].dtype == np.int32
            assert cell[GENERATOR_LOGPROBS].dtype == np.float32
            assert cell[TOKEN_VERSIONS].dtype == np.int32
            assert len(cell[RESPONSE_IDS]) == len(cell[GENERATOR_LOGPROBS]) == row.num_tokens
            assert cell[SAMPLING].tolist() == [1.0, 0, 1.0, 5 + row.row_id, row.row_id, 1]

    drive(engine_case, run_dir, scenario)


def test_a_group_is_not_held_up_by_a_later_one_of_the_same_prompt(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await connect(source := make_source(engine_case), generator)
        await publish(source, generator, 1)
        later = [request(2, min_version=2), request(3, min_version=2)]
        await generator.submit([request(0), request(1), *later])
        rows = await asyncio.wait_for(collect(generator), 20)  # long before the heartbeat
        assert [row.row_id for row in rows] == [0, 1]

    drive(engine_case, run_dir, scenario, load_weights=False, heartbeat_s=60.0)


def test_rows_that_finished_together_are_written_together(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i) for i in range(4)])
        assert len(await gather(generator, 4)) == 4
        assert len(storage.writes) == 1

    drive(engine_case, run_dir, scenario)


def test_aborted_rows_come_out_marked_whether_running_or_queued(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i, max_tokens=120) for i in range(4)])
        await generator.submit([request(9, min_version=5)])
        await generator.abort_requests([2, 9])
        rows = {row.row_id: row for row in await gather(generator, 5)}
        assert rows[2].finish_reason is rows[9].finish_reason is FinishReason.ABORTED
        assert rows[9].num_tokens == 0
        assert rows[9].spans == ()
        assert storage.rows[9][RESPONSE_IDS].shape == (0,)
        assert {rows[i].finish_reason for i in (0, 1, 3)} == {FinishReason.LENGTH}

    drive(engine_case, run_dir, scenario)


def test_a_partial_row_is_resumed_from_storage_on_another_replica(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def write_whole(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(0, max_tokens=12)])
        await gather(generator, 1)

    uncut, storage = drive(engine_case, run_dir, write_whole), WatchedStorage()

    async def bucket(resume: bool) -> RolloutInfo:
        generator = make(engine_case, storage, run_dir)
        await generator.start()
        await generator.submit([request(0, max_tokens=12, segment_tokens=5, resume=resume)])
        (row,) = await gather(generator, 1)
        await generator.close()
        return row

    rows = [asyncio.run(bucket(resume)) for resume in (False, True, True)]
    assert [row.num_tokens for row in rows] == [5, 10, 12]
    assert [row.finish_reason for row in rows] == [
        FinishReason.SEGMENT,
        FinishReason.SEGMENT,
        FinishReason.LENGTH,
    ]
    assert_same(engine_case, storage, uncut, 1)


def test_a_prompt_that_does_not_fit_is_refused_at_submit(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        with pytest.raises(ValueError, match=r"generator\.max_model_len 128"):
            await generator.submit([request(0, prompt_ids=(1,) * 128)])

    drive(engine_case, run_dir, scenario)


def test_prefill_decode_and_waiting_have_spans_of_their_own(
    engine_case: EngineCase, run_dir: str, tmp_path: Path
) -> None:
    spans = Spans("generator-0", tmp_path)

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i, max_tokens=7) for i in range(3)])
        await gather(generator, 3)
        await collect(generator)

    drive(engine_case, run_dir, scenario, spans=spans)
    spans.close()
    lines = [
        json.loads(line) for line in (tmp_path / "generator-0.jsonl").read_text().split("\n")[1:-1]
    ]
    decoded = [line["tokens"] for line in lines if line["name"] == "decode"]
    assert sum(decoded) == 21
    prefilled = sum(line["tokens"] for line in lines if line["name"] == "prefill")
    assert prefilled == (2 if engine_case.counts_prefill else 0)
    assert {line["cat"] for line in lines if line["name"] in ("decode", "prefill")} == {"busy"}
    waits = [line for line in lines if line["name"] == "requests"]
    assert waits
    assert {line["cat"] for line in waits} == {"wait"}
    own = [line for line in lines if line["name"] not in ("get", "put")]  # storage beside decoding
    ordered = sorted((line["start_ns"], line["end_ns"]) for line in own)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def test_a_replica_without_weights_starts_at_its_first_commit(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def whole(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(0)])
        await gather(generator, 1)

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(0)])
        assert await collect(generator) == []
        source = make_source(engine_case)
        await connect(source, generator)
        assert await publish(source, generator, 4) == 0
        (row,) = await gather(generator, 1)
        assert [(s.version, s.num_tokens) for s in row.spans] == [(4, 10)]

    loaded = drive(engine_case, run_dir, whole)
    assert_same(engine_case, drive(engine_case, run_dir, scenario, load_weights=False), loaded, 1)


@pytest.mark.parametrize("staging", ["double_buffer", "host"])
def test_versions_are_published_while_decoding_and_a_discarded_one_is_not(
    engine_case: EngineCase, run_dir: str, staging: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        source = make_source(engine_case, 0.1)
        await connect(source, generator)
        await generator.submit([request(i, max_tokens=110) for i in range(4)])
        source.tensors.label(1)
        await generator.prepare(1)
        await generator.abort(1)
        num_running = await publish(source, generator, 2)
        await publish(source, generator, 5)
        rows = await gather(generator, 4)
        seen = set()
        for row in rows:
            assert sum(span.num_tokens for span in row.spans) == 110
            versions = storage.rows[row.row_id][TOKEN_VERSIONS]
            assert [span.version for span in row.spans] == sorted(set(versions.tolist()))
            seen |= {span.version for span in row.spans}
        assert seen <= {0, 2, 5}
        if num_running:
            assert seen & {2, 5}

    drive(engine_case, run_dir, scenario, weights={"staging": staging})


def test_a_replica_passes_on_what_it_received(engine_case: EngineCase, run_dir: str) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        direct = WatchedStorage()
        first = make(engine_case, direct, run_dir, replica=0)
        await first.start()
        try:
            source = make_source(engine_case, 0.1)
            for version in (1, 2):  # both of its memories serve as source
                await connect(first, generator)
                await connect(source, first, 0)
                await publish(source, first, version)
                await publish(first, generator, version)
            handles = await generator.prepare(3)
            with pytest.raises(StaleVersion):
                await first.write(3, handles)
            await generator.abort(3)
            await first.submit([request(0, max_tokens=30)])
            await gather(first, 1)
            await generator.submit([request(0, max_tokens=30)])
            (row,) = await gather(generator, 1)
            assert [span.version for span in row.spans] == [2]
            assert_same(engine_case, storage, direct, 1)
        finally:
            await first.close()

    drive(engine_case, run_dir, scenario, load_weights=False)


def test_offloading_in_the_middle_of_rollouts_changes_nothing(
    engine_case: EngineCase, run_dir: str, tmp_path: Path
) -> None:
    """Twice with rollouts in the cache, once without any; prompts are shared across."""
    spans = Spans("generator-0", tmp_path)
    both = ["kv", "weights"]

    async def stay(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i, max_tokens=100) for i in range(6)])
        await gather(generator, 6)
        await generator.submit([request(6), request(7)])
        await gather(generator, 2)

    async def offload(generator: Replica, storage: WatchedStorage) -> None:
        await generator.submit([request(i, max_tokens=100) for i in range(5)])
        await asyncio.sleep(0.02)
        await generator.offload(both)
        await generator.offload(["kv"])  # has left: no effect
        await generator.submit([request(5, max_tokens=100)])
        await collect(generator)
        num_stored = len(storage.rows)
        assert await collect(generator) == []
        assert len(storage.rows) == num_stored
        await generator.prefetch(both)
        await generator.onload(["weights"])
        assert await collect(generator) == []
        await generator.onload(["kv"])
        rows: list[RolloutInfo] = []
        while len(storage.rows) < 6:
            rows += await asyncio.wait_for(collect(generator), 20)
        await generator.offload(both)
        await generator.onload(both)
        await generator.submit([request(6), request(7)])
        await gather(generator, 2)

    stayed = drive(engine_case, run_dir, stay)
    left = drive(engine_case, run_dir, offload, spans=spans)
    assert_same(engine_case, left, stayed, 8)
    spans.close()
    text = (tmp_path / "generator-0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    for name in ("offload", "onload"):
        moves = [line for line in lines if line["name"] == name]
        assert sorted(line["tag"] for line in moves) == ["kv", "kv", "weights", "weights"]
        shapes = parameter_shapes(read_architecture(engine_case.checkpoint)).values()
        weight_bytes = sum(math.prod(shape) for shape in shapes)
        assert all(line["bytes"] > weight_bytes for line in moves if line["tag"] == "weights")
    assert any(line["name"] == "phase" and line["cat"] == "wait" for line in lines)


def test_a_version_published_while_the_cache_is_away_decodes_after_it_is_back(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        source = make_source(engine_case, 0.1)
        await connect(source, generator)
        await generator.submit([request(i, max_tokens=110) for i in range(4)])
        await generator.offload(["kv", "weights"])
        early = asyncio.create_task(publish(source, generator, 1))
        await asyncio.sleep(0.05)
        assert not early.done()  # there is no memory to write to
        await generator.onload(["weights"])
        await early
        await generator.submit([request(4)])
        assert await collect(generator) == []
        await generator.onload(["kv"])
        rows = {row.row_id: row for row in await gather(generator, 5)}
        assert rows[4].spans[0].version == 1
        assert all(row.spans[-1].version == 1 for row in rows.values())

    drive(engine_case, run_dir, scenario)


def test_collect_returns_nothing_within_the_heartbeat_when_idle(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        assert await asyncio.wait_for(collect(generator), 5) == []
        assert len(storage.writes) == 0

    drive(engine_case, run_dir, scenario)


def test_rows_are_reported_again_until_they_have_arrived(
    engine_case: EngineCase, run_dir: str
) -> None:
    """Whether an answer was lost, or the one that asked for it."""

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        lost = asyncio.create_task(generator.collect(0))
        await asyncio.sleep(0.01)
        await generator.submit([request(0), request(1, max_tokens=20)])
        first, rows = await generator.collect(0)
        assert rows
        same, others = await lost
        num_both = min(len(others), len(rows))  # one was answered later
        assert num_both
        assert (same, others[:num_both]) == (first, rows[:num_both]), "whatever came of it"
        while len(rows) < 2:  # or both at once
            again, more = await generator.collect(first + len(rows))
            assert again == first + len(rows)
            rows += more
        again, kept = await asyncio.wait_for(generator.collect(0), 20)  # not after the heartbeat
        assert kept == rows[again - first :], "at once, what was not said to have arrived"
        assert kept
        waiting = asyncio.create_task(generator.collect(first + 2))
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done(), "all has arrived, so there is nothing to report"
        waiting.cancel()
        assert len(storage.writes) <= 2

    drive(engine_case, run_dir, scenario, heartbeat_s=60.0)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("run"))
