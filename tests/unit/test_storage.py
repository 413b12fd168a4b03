"""Storage units, the client over several of them, and the form in which columns travel."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from llamarl.executors.specs import StorageSpec
from llamarl.executors.storage import StorageExecutor
from llamarl.metrics.span import Spans
from llamarl.storage.packed_columns import CompressedColumns, PackedColumns, decode, encode
from llamarl.storage.store import Store
from llamarl.types import (
    COMPLETION_TEXT,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_ID,
    PROMPT_IDS,
    PROMPT_TEXT,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
)
from tests.json_lines import read_lines
from tests.unit.stored_rows import held_bytes

DTYPES = st.sampled_from([np.int32, np.float32, np.float64])


def unit(number: int = 0, folder: Path | None = None, tokens: bool = False) -> StorageExecutor:
    storage = StorageExecutor(
        StorageSpec(
            unit=number,
            archive_folder=str(folder) if folder is not None else None,
            archive_tokens=tokens,
        ),
        rank=0,
        num_ranks=1,
        spans=Spans(f"storage-{number}", None),
    )
    asyncio.run(storage.start())
    return storage


def rollout(num_tokens: int, finish: FinishReason = FinishReason.STOP, version: int = 3) -> Columns:
    return {
        PROMPT_IDS: [np.arange(4, dtype=np.int32)],
        RESPONSE_IDS: [np.arange(num_tokens, dtype=np.int32) + 100],
        GENERATOR_LOGPROBS: [np.full(num_tokens, -0.5, dtype=np.float32)],
        TOKEN_VERSIONS: [np.full(num_tokens, version, dtype=np.int32)],
        SAMPLING: [np.array([1.0, 0, 1.0, 512, 2**52 + 1, FINISH_CODES[finish]])],
    }


def join(rollouts: list[Columns]) -> Columns:
    return {name: [columns[name][0] for columns in rollouts] for name in rollouts[0]}


def reward(value: float) -> Columns:
    return {REWARD: [np.array([value])]}


def utf8(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


@given(
    st.dictionaries(
        st.text(min_size=1),
        DTYPES.flatmap(lambda dtype: st.lists(nps.arrays(dtype, st.integers(0, 9)))),
        max_size=4,
    )
)
def test_columns_arrive_as_they_were_sent(columns: Columns) -> None:
    sent_as = [pickle.dumps(make(columns)) for make in (PackedColumns, CompressedColumns)]
    for arrived in (decode(encode(columns)), *map(pickle.loads, sent_as)):
        assert type(arrived) is dict
        assert arrived.keys() == columns.keys()
        for name, cells in columns.items():
            assert len(arrived[name]) == len(cells)
            for cell, sent in zip(arrived[name], cells, strict=True):
                assert cell.dtype == sent.dtype
                np.testing.assert_array_equal(cell, sent)


def test_a_message_is_hardly_larger_than_its_arrays() -> None:
    lengths = np.random.default_rng(0).integers(0, 64, 2000)
    columns = {RESPONSE_IDS: [np.arange(n, dtype=np.int32) for n in lengths]}
    num_bytes = 4 * int(lengths.sum())
    assert len(pickle.dumps(PackedColumns(columns))) <= num_bytes + 4 * len(lengths) + 500
    assert len(pickle.dumps(columns)) > num_bytes + 20 * len(lengths)  # else why


@pytest.mark.parametrize(
    "cells",
    [
        [np.zeros(2, np.int32), np.zeros(2, np.int64)],
        [np.zeros((2, 2), np.int32)],
        [np.array(1.0)],
    ],
)
def test_columns_of_mixed_or_nested_arrays_are_refused(cells: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="column reward must hold 1-D arrays of one dtype"):
        encode({"reward": cells})


@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_rows_come_back_in_the_order_asked_for_whatever_the_units(num_units: int) -> None:
    units = [unit(number) for number in range(num_units)]
    store = Store(list(units))
    row_ids = [7, 2, 9, 4, 11, 0]

    async def scenario() -> None:
        await store.write(row_ids, join([rollout(row_id) for row_id in row_ids]))
        asked = [11, 0, 7, 4]
        columns = await store.read(asked, [RESPONSE_IDS, SAMPLING])
        assert list(columns) == [RESPONSE_IDS, SAMPLING]
        assert [len(cell) for cell in columns[RESPONSE_IDS]] == asked
        assert await store.read([], [REWARD]) == {REWARD: []}
        wanted = [sum(row_id % num_units == n for row_id in row_ids) for n in range(num_units)]
        assert [len(each._table) for each in units] == wanted
        await store.retire(row_ids[:-1], {"outcome": "trained", "version": 1})
        assert sum(len(each._table) for each in units) == 1

    asyncio.run(scenario())


def test_units_are_asked_at_the_same_time() -> None:
    class Meeting(StorageExecutor):
        """Answers once both units were asked."""

        barrier = asyncio.Barrier(2)

        async def read(self, row_ids: list[int], names: list[str]) -> Columns:
            await self.barrier.wait()
            return await super().read(row_ids, names)

    async def scenario() -> None:
        units = [
            Meeting(
                StorageSpec(unit=number, archive_folder=None, archive_tokens=False),
                rank=0,
                num_ranks=1,
                spans=Spans("s", None),
            )
            for number in range(2)
        ]
        store = Store(list(units))
        await store.write([0, 1], join([rollout(5), rollout(6)]))
        async with asyncio.timeout(5):
            columns = await store.read([1, 0], [RESPONSE_IDS])
        assert [len(cell) for cell in columns[RESPONSE_IDS]] == [6, 5]

    asyncio.run(scenario())


def test_columns_become_ready_in_any_order() -> None:
    storage = unit()

    async def scenario() -> None:
        await storage.write([5], reward(0.5))
        with pytest.raises(KeyError, match="row 5 has no column response_ids"):
            await storage.read([5], [REWARD, RESPONSE_IDS])
        await storage.write([5], rollout(3))
        await storage.write([5], {REF_LOGPROBS: [np.zeros(3, np.float32)]})
        columns = await storage.read([5], [REF_LOGPROBS, REWARD])
        assert columns[REWARD][0].tolist() == [0.5]
        with pytest.raises(KeyError, match="row 6 is not stored"):
            await storage.read([5, 6], [REWARD])

    asyncio.run(scenario())


def test_a_cell_is_written_once_unless_its_rollout_is_partial() -> None:
    storage = unit()

    async def scenario() -> None:
        await storage.write([1], rollout(3, FinishReason.SEGMENT))
        await storage.write([1], rollout(6, FinishReason.SEGMENT))
        await storage.write([1], rollout(9))
        columns = await storage.read([1], [RESPONSE_IDS])
        assert len(columns[RESPONSE_IDS][0]) == 9
        before = await storage.read([1], [PROMPT_IDS, RESPONSE_IDS, SAMPLING])
        with pytest.raises(RuntimeError, match="row 1 already has column prompt_ids"):
            await storage.write([2, 1], join([rollout(2), rollout(2)]))
        assert len(storage._table) == 1  # all or nothing
        np.testing.assert_equal(await storage.read([1], list(before)), before)
        await storage.write([1], reward(1.0))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await storage.write([1], reward(0.0))
        for logprob in (-1.0, -2.0):  # each step that uses the rollout
            cell = np.full(9, logprob, np.float32)
            await storage.write([1], {TRAINER_LOGPROBS: [cell]})
        found = await storage.read([1], [TRAINER_LOGPROBS])
        assert found[TRAINER_LOGPROBS][0].tolist() == [-2.0] * 9

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("row_ids", "columns", "text"),
    [
        ([1], {RESPONSE_IDS: [np.zeros(2, np.int64)]}, "response_ids must be 1-D int32, got int64"),
        ([1], {REWARD: [np.array(1.0)]}, r"reward must be 1-D float64, got float64 \(\)"),
        ([1, 1], {REWARD: [np.zeros(1), np.zeros(1)]}, "row ids of one write must differ"),
    ],
)
def test_malformed_writes_are_refused(row_ids: list[int], columns: Columns, text: str) -> None:
    storage = unit()
    with pytest.raises(ValueError, match=text):
        asyncio.run(storage.write(row_ids, columns))
    if len(set(row_ids)) == len(row_ids):
        with pytest.raises(ValueError, match=text):
            asyncio.run(Store([storage]).write(row_ids, columns))
    assert not len(storage._table)


def test_a_column_without_an_array_per_row_is_refused() -> None:
    storage = unit()
    with pytest.raises(ValueError, match=r"one array per row \(2\), got 1"):
        asyncio.run(Store([storage]).write([1, 2], reward(1.0)))
    assert not len(storage._table)


def test_stored_arrays_share_no_memory_with_the_senders() -> None:
    storage = unit()
    sent = rollout(4)

    async def scenario() -> None:
        await storage.write([1], sent)
        sent[RESPONSE_IDS][0][:] = -1
        (await storage.read([1], [RESPONSE_IDS]))[RESPONSE_IDS][0][:] = -2
        kept = (await storage.read([1], [RESPONSE_IDS]))[RESPONSE_IDS][0]
        assert kept.tolist() == [100, 101, 102, 103]

    asyncio.run(scenario())


def test_retired_rows_leave_a_line_each(tmp_path: Path) -> None:
    storage = unit(1, tmp_path)
    mixed = rollout(5)
    mixed[TOKEN_VERSIONS] = [np.array([2, 2, 4, 4, 4], dtype=np.int32)]
    outcome = {"outcome": "trained", "version": 5, "oldest_version": 2, "group_id": 8}

    async def scenario() -> None:
        await storage.write([1, 3], join([mixed, rollout(2, FinishReason.LENGTH)]))
        text = {PROMPT_TEXT: [utf8("2+2?")], COMPLETION_TEXT: [utf8("4 €")]}
        await storage.write([1], reward(1.5) | {PROMPT_ID: [np.array([7.0])]} | text)
        await storage.write([3], reward(float("nan")))
        await storage.write([5], reward(0.0))
        await storage.retire([1, 3], outcome)
        await storage.retire([5], {"outcome": "dropped", "reason": "failed"})
        with pytest.raises(ValueError, match='an outcome must have the key "outcome"'):
            await storage.retire([], {"version": 1})

    asyncio.run(scenario())
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 512, "seed": 2**52 + 1}
    first, second, third = read_lines(tmp_path / "rollouts-1.jsonl")
    assert first == {
        "row_id": 1,
        **outcome,
        "prompt_id": 7,
        "num_prompt_tokens": 4,
        "num_tokens": 5,
        "spans": [[2, 2], [4, 3]],
        "finish": "stop",
        "reward": 1.5,
        "sampling": sampling,
        "prompt": "2+2?",
        "completion": "4 €",
    }
    assert (second["spans"], second["finish"], second["reward"]) == ([[3, 2]], "length", None)
    assert (third["outcome"], third["reason"], third["num_tokens"]) == ("dropped", "failed", 0)
    assert (third["spans"], third["finish"], third["sampling"]) == ([], None, None)


def test_the_archive_keeps_tokens_where_asked(tmp_path: Path) -> None:
    storage = unit(0, tmp_path, tokens=True)
    asyncio.run(storage.write([1], rollout(2)))
    asyncio.run(storage.retire([1], {"outcome": "unused"}))
    (line,) = read_lines(tmp_path / "rollouts-0.jsonl")
    assert line[PROMPT_IDS] == [0, 1, 2, 3]
    assert line[RESPONSE_IDS] == [100, 101]
    assert line[GENERATOR_LOGPROBS] == [-0.5, -0.5]
    assert REF_LOGPROBS not in line


def test_no_row_is_archived_twice_and_a_row_id_may_start_again(tmp_path: Path) -> None:
    storage = unit(0, tmp_path)

    async def scenario() -> None:
        await storage.retire([1], {"outcome": "unused"})  # never written
        await storage.write([1], rollout(2))
        await storage.retire([1], {"outcome": "lost"})
        await storage.retire([1], {"outcome": "lost"})
        await storage.write([1], rollout(3))
        await storage.retire([1, 1], {"outcome": "trained"})

    asyncio.run(scenario())
    lines = read_lines(tmp_path / "rollouts-0.jsonl")
    assert [(line["outcome"], line["num_tokens"]) for line in lines] == [
        ("lost", 2),
        ("trained", 3),
    ]


def test_a_line_mixed_by_a_kill_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "rollouts-0.jsonl"
    path.write_text('{"row_id": 1}\n{"row_id": 2, "fa')
    storage = unit(0, tmp_path)
    asyncio.run(storage.write([3], rollout(2)))
    asyncio.run(storage.retire([3], {"outcome": "trained"}))
    assert [line["row_id"] for line in read_lines(path)] == [1, 3]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    storage = unit(0, tmp_path)
    storage._archive._file = Path("/dev/full").open("a")  # noqa: SIM115 - the unit closes it
    asyncio.run(storage.write([1], rollout(2)))
    with pytest.raises(OSError, match="cannot write the archive of rollouts: No space left") as e:
        asyncio.run(storage.retire([1], {"outcome": "trained"}))
    assert e.value.filename == str(tmp_path / "rollouts-0.jsonl")


def test_a_unit_must_be_started_before_it_archives(tmp_path: Path) -> None:
    storage = StorageExecutor(
        StorageSpec(
            unit=0,
            archive_folder=str(tmp_path),
            archive_tokens=False,
        ),
        rank=0,
        num_ranks=1,
        spans=Spans("s", None),
    )
    asyncio.run(storage.write([1], rollout(2)))
    with pytest.raises(RuntimeError, match="must be started"):
        asyncio.run(storage.retire([1], {"outcome": "trained"}))


def test_retired_rows_give_their_memory_back() -> None:
    storage = unit()
    row_bytes = 50_000 * 12

    async def fill(row_ids: range) -> None:
        message = pickle.dumps(PackedColumns(join([rollout(50_000) for _ in row_ids])))
        await storage.write(list(row_ids), pickle.loads(message))

    async def scenario() -> None:
        await fill(range(1))  # whatever is allocated once
        before = held_bytes()
        await fill(range(1, 11))
        assert held_bytes() - before > 10 * row_bytes
        assert (await storage.usage())["memory_bytes"] > 11 * row_bytes
        await storage.retire(list(range(1, 10)), {"outcome": "trained"})
        # One of ten rows stays: none of the others may live on in the message it came in.
        assert held_bytes() - before < 2 * row_bytes
        usage = await storage.usage()
        assert (usage["num_rows"], usage["memory_bytes"] < 3 * row_bytes) == (2, True)
        left = await storage.read([10], [RESPONSE_IDS])
        np.testing.assert_equal(left[RESPONSE_IDS], rollout(50_000)[RESPONSE_IDS])

    tracemalloc.start()
    try:
        asyncio.run(scenario())
    finally:
        tracemalloc.stop()
