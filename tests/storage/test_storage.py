"""What storage promises its clients and records of retired rows, whichever way leads to it."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from llamarl.core.errors import NotStored
from llamarl.core.records import (
    FINISH_CODES,
    PROMPT_ID,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
    conversation_row,
)
from llamarl.metrics.span import Spans
from llamarl.storage.client import MESSAGE_BYTES, RecordingStore, Store
from llamarl.storage.columns import COLUMNS
from llamarl.storage.table import FULL_BYTES
from tests.storage.stored_rows import (
    NAMES,
    WAYS,
    assert_same,
    client,
    held_bytes,
    numbers,
    opened,
    rows,
)

DTYPES = st.sampled_from(["?", "u1", "i2", "i4", "i8", "f2", "f4", "f8"])
TRAINED = {"outcome": "trained", "version": 1}


def columns_of(num_rows: int) -> st.SearchStrategy[Columns]:
    cells = DTYPES.flatmap(
        lambda dtype: st.lists(
            nps.arrays(dtype, st.integers(0, 30)), min_size=num_rows, max_size=num_rows
        )
    )
    names = st.text(min_size=1).filter(lambda name: name not in COLUMNS)  # which have their dtypes
    return st.dictionaries(names, cells, min_size=1, max_size=4)


def parts(values: list, rng: random.Random) -> list[list]:
    """The values in two parts and in any order; one part may be missing."""
    shuffled, place = rng.sample(values, len(values)), rng.randint(0, len(values))
    return [part for part in (shuffled[:place], shuffled[place:]) if part]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(st.integers(1, 6).flatmap(columns_of), st.integers(1, 3), st.randoms())
def test_any_numbers_come_back_as_they_were_written_in_whatever_order(
    tmp_path_factory: pytest.TempPathFactory, way: str, columns: Columns, num_units: int, random
) -> None:
    row_ids = list(range(len(next(iter(columns.values())))))

    def cells_of(some: list[int], names: list[str]) -> Columns:
        return {name: [columns[name][row_id] for row_id in some] for name in names}

    async def scenario(folder: Path) -> None:
        async with opened(way, folder, num_units) as (_, store):
            for some in parts(row_ids, random):
                for names in parts([*columns], random):
                    await store.write(some, cells_of(some, names))
            order, names = (random.sample(each, len(each)) for each in (row_ids, [*columns]))
            found = await store.read(order, names)
            assert [*found] == names
            assert_same(found, cells_of(order, names))

    asyncio.run(scenario(tmp_path_factory.mktemp("units")))


@pytest.mark.parametrize(("num_units", "num_tokens"), [(1, 1), (2, 40), (3, 900), (1, 9000)])
async def test_rows_come_back_in_the_order_asked_for_whatever_the_units_and_the_writes(
    opened_storage, num_units: int, num_tokens: int
) -> None:
    async with opened_storage(num_units) as (units, store):
        for first in range(0, 90, 9):
            some = list(range(first, first + 9))
            await store.write(some, rows(some, num_tokens))
            await store.write(some, numbers(REWARD, *some))
        assert [len(each._table) for each in units] == [90 // num_units] * num_units
        asked = [int(i) for i in np.random.default_rng(0).permutation(90)]
        for some in (asked, asked[:7], asked[:1], [5, 3, 5]):
            found = await store.read(some, NAMES)
            assert [*found] == NAMES
            assert_same(found, rows(some, num_tokens))
        found = await store.read(asked, [REWARD])
        assert [cell.item() for cell in found[REWARD]] == asked
        assert await store.read([], [REWARD]) == {REWARD: []}
        assert await store._units[0].read([], NAMES) == {name: [] for name in NAMES}
        assert await store.read(asked, []) == {}
        await store.retire(asked[:-1], TRAINED)
        assert (await store.usage())["num_rows"] == 1
        assert_same(await store.read(asked[-1:], NAMES), rows(asked[-1:], num_tokens))
        await store.retire(asked, TRAINED)
        for each in units:
            each._slabs.drop_spares()
        usage = await store.usage()
        assert usage["num_rows"] == usage["spilled_bytes"] == usage["is_full"] == 0
        assert usage["memory_bytes"] < FULL_BYTES * num_units


async def test_units_are_asked_at_the_same_time(opened_storage) -> None:
    async with opened_storage(2) as (units, store):
        barrier = asyncio.Barrier(len(units))

        class Meeting:
            """Goes on once all units were asked."""

            def __init__(self, reached) -> None:
                self.reached = reached

            def __getattr__(self, name):
                async def call(*args):
                    await barrier.wait()
                    return await getattr(self.reached, name)(*args)

                return call

        store = Store([Meeting(each) for each in store._units])
        async with asyncio.timeout(20):
            await store.write([0, 1], rows([0, 1], 5))
            assert_same(await store.read([1, 0], NAMES), rows([1, 0], 5))
            assert {info.row_id for info in await store.find([0, 1])} == {0, 1}
            await store.fence("generator-0/a")
            await store.erase([0, 1], [REWARD])
            await store.retire([0, 1], TRAINED)
            assert (await store.usage())["num_rows"] == 0


async def test_columns_become_ready_in_any_order(opened_storage) -> None:
    async with opened_storage() as (_, store):
        await store.write([5], numbers(REWARD, 0.5))
        with pytest.raises(KeyError, match="row 5 has no column response_ids, only"):
            await store.read([5], [REWARD, RESPONSE_IDS])
        assert await store.find([5]) == []
        await store.write([5], rows([5], 3))
        await store.write([5], {REF_LOGPROBS: [np.zeros(3, np.float32)]})
        columns = await store.read([5], [REF_LOGPROBS, REWARD])
        assert columns[REWARD][0].tolist() == [0.5]
        with pytest.raises(NotStored, match="row 6 is not stored"):
            await store.read([5, 6], [REWARD])


async def test_a_cell_is_written_once_unless_its_rollout_is_partial(opened_storage) -> None:
    async with opened_storage() as (_, store):
        await store.write([1], rows([1], 3, FinishReason.SEGMENT))
        await store.write([1], rows([1], 6, FinishReason.SEGMENT))
        await store.write([1], rows([1], 9))
        with pytest.raises(RuntimeError, match="row 1 already has column prompt_ids") as raised:
            await store.write([2, 1], rows([2, 1], 2))
        assert "raised in storage-0" in raised.value.__notes__[0]
        assert (await store.usage())["num_rows"] == 1  # all or nothing
        assert_same(await store.read([1], NAMES), rows([1], 9))
        await store.write([1], numbers(REWARD, 1))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await store.write([1], numbers(REWARD, 0))
        for logprob in (-1.0, -2.0):  # each step that uses the rollout
            cell = np.full(9, logprob, np.float32)
            await store.write([1], {TRAINER_LOGPROBS: [cell]})
        found = await store.read([1], [TRAINER_LOGPROBS])
        assert found[TRAINER_LOGPROBS][0].tolist() == [-2.0] * 9


async def test_partial_rollouts_that_are_written_again_give_their_memory_back(
    opened_storage,
) -> None:
    async with opened_storage() as (units, store):
        for num_tokens in range(10_000, 120_000, 10_000):  # 16 MB
            await store.write([1, 2], rows([1, 2], num_tokens, FinishReason.SEGMENT))
        await store.write([1, 2], rows([1, 2], 120_000))
        assert_same(await store.read([2, 1], NAMES), rows([2, 1], 120_000))
        units[0]._slabs.drop_spares()
        assert (await store.usage())["memory_bytes"] < 2 * 120_010 * 12 + 1.5 * FULL_BYTES
        with pytest.raises(RuntimeError, match="is not partial"):
            await store.write([2], rows([2], 40_000))


MALFORMED = [
    ({RESPONSE_IDS: [np.zeros(2, np.int64)]}, "response_ids must be 1-D int32, got int64"),
    ({REWARD: [np.zeros(1, np.float32)]}, "reward must be 1-D float64, got float32"),
    ({REWARD: [np.array(1.0)]}, "reward must hold 1-D arrays of one dtype"),
    ({RESPONSE_IDS: [np.zeros((2, 2), np.int32)]}, "must hold 1-D arrays of one dtype"),
    ({"quality": [np.zeros(1), np.zeros(1, np.int32)]}, "must hold 1-D arrays of one dtype"),
    # The first row fills a message of its own.
    ({"quality": [np.zeros(MESSAGE_BYTES), np.zeros(1, np.int32)]}, "1-D arrays of one dtype"),
    *(
        ({"quality": [np.zeros(2, dtype)]}, "quality must hold numbers of at most 8 bytes, got ")
        for dtype in ("U1", "c16", ">f8", "O", "M8[s]")
    ),
]


async def test_malformed_writes_are_refused_and_leave_nothing(opened_storage) -> None:
    async with opened_storage() as (_, store):
        for columns, text in MALFORMED:
            row_ids = list(range(len(next(iter(columns.values())))))
            right = {"other": [np.zeros(1, np.int32) for _ in row_ids]}
            with pytest.raises(ValueError, match=text):
                await store.write(row_ids, right | columns)
        with pytest.raises(ValueError, match="row ids of one write must differ"):
            await store.write([1, 1], numbers(REWARD, 0, 0))
        with pytest.raises(ValueError, match=r"one array per row \(2\), got 1"):
            await store.write([1, 2], numbers(REWARD, 0))
        with pytest.raises(ValueError, match="a write must have columns, got none"):
            await store.write([1], {})
        with pytest.raises(ValueError, match='an outcome must have the key "outcome"'):
            await store.retire([1], {"version": 3})
        assert (await store.usage())["num_rows"] == 0
        await store.write([1], numbers("other", 1))  # whose dtype no refused write has fixed


@pytest.mark.parametrize("num_tokens", [10, 5000])
async def test_arrays_with_gaps_arrive_too(opened_storage, num_tokens: int) -> None:
    async with opened_storage() as (_, store):
        columns = {"quality": [np.arange(3 * num_tokens)[::3], np.arange(4)]}
        await store.write([1, 2], columns)
        assert_same(await store.read([1, 2], ["quality"]), columns)


@pytest.mark.parametrize("num_tokens", [5, 50_000])
async def test_what_was_read_is_as_it_was_written_whatever_happens_and_cannot_be_written(
    opened_storage, num_tokens: int
) -> None:
    async with opened_storage() as (_, store):
        sent = rows([4, 5], num_tokens)
        await store.write([4, 5], sent)
        for cell in (cell for cells in sent.values() for cell in cells):
            cell[:] = 77
        found = await store.read([4, 5], NAMES)
        assert_same(found, rows([4, 5], num_tokens))
        await store.retire([4, 5], TRAINED)
        await store.write([6, 7], rows([6, 7], num_tokens))
        gc.collect()
        assert_same(found, rows([4, 5], num_tokens))
        for cell in (cell for cells in found.values() for cell in cells):
            with pytest.raises(ValueError, match="read-only"):
                cell[:] = 1


async def test_memory_follows_the_rows_that_are_left(opened_storage) -> None:
    async with opened_storage() as (units, store):
        (unit,), num_tokens = units, 4000
        for first in range(0, 400, 40):  # 19 MB
            some = list(range(first, first + 40))
            await store.write(some, rows(some, num_tokens))
        left = [int(i) for i in np.random.default_rng(1).permutation(400)]
        while len(left) > 10:
            gone, left = left[:65], left[65:]
            await store.retire(gone, TRAINED)
            unit._slabs.drop_spares()
            usage = await store.usage()
            assert usage["num_rows"] == len(left)
            assert usage["memory_bytes"] <= 2 * len(left) * (num_tokens + 3) * 12 + 2 * FULL_BYTES
            assert_same(await store.read(left, NAMES), rows(left, num_tokens))
        await store.retire(left, TRAINED)
        unit._slabs.drop_spares()
        assert all(slab is unit._slabs.shared for slab in unit._slabs.by_number.values())


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def test_the_host_gets_the_memory_of_retired_rows_back(opened_storage, traced) -> None:
    row_bytes = 50_000 * 12
    async with opened_storage() as (units, store):
        await store.write([0], rows([0], 50_000))  # whatever is allocated once
        before, some = held_bytes(), list(range(1, 11))
        await store.write(some, rows(some, 50_000))
        assert held_bytes() - before > 10 * row_bytes
        assert (await store.usage())["memory_bytes"] > 11 * row_bytes
        await store.retire(some[:-1], TRAINED)
        units[0]._slabs.drop_spares()
        # One of ten rows stays: none of the others may live on in the message it came in.
        assert held_bytes() - before < 2 * row_bytes
        usage = await store.usage()
        assert (usage["num_rows"], usage["memory_bytes"] < 3 * row_bytes) == (2, True)
        assert_same(await store.read([10], NAMES), rows([10], 50_000))


async def test_many_calls_at_once_get_their_own_answers(storage_way, opened_storage) -> None:
    async with opened_storage() as (units, store):
        clients = [store, *(client(storage_way, units[0]) for _ in range(3))]
        row_ids = list(range(100))
        await asyncio.gather(*(clients[i % 4].write([i], rows([i], 10 + 40 * i)) for i in row_ids))
        found = await asyncio.gather(*(clients[i % 4].read([i], NAMES) for i in row_ids))
        for row_id, columns in zip(row_ids, found, strict=True):
            assert_same(columns, rows([row_id], 10 + 40 * row_id))


@pytest.mark.parametrize("num_units", [1, 2])
async def test_a_fenced_writer_gets_nothing_into_storage_and_all_others_do(
    opened_storage, num_units: int
) -> None:
    async with opened_storage(num_units) as (_, store):
        lost, other, next_one = (store.signed(f"generator-{i}") for i in ("0/a", "1/b", "0/c"))
        await lost.write([1], rows([1], 3, FinishReason.SEGMENT))
        await lost.write([3], rows([3], 4))
        await store.fence("generator-0/a")
        await store.retire([1, 2], {"outcome": "lost", "replica": 0})
        # The replica that was given up wakes: no row is its own, whether others write it or not.
        await lost.write([1, 2, 4], rows([1, 2, 4], 5))
        for row_id in (1, 2, 4):
            with pytest.raises(KeyError):
                await store.read([row_id], [RESPONSE_IDS])
        await next_one.write([1], rows([1], 8))
        await other.write([2], rows([2], 9))
        await lost.write([2, 1], rows([2, 1], 6))
        for row_id, num_tokens in ((1, 8), (2, 9), (3, 4)):  # row 3 was there before
            assert_same(await store.read([row_id], NAMES), rows([row_id], num_tokens))
        with pytest.raises(RuntimeError, match="row 1 already has column"):
            await other.write([1], rows([1], 8))
        with pytest.raises(ValueError, match="writer must have a name to be fenced, got none"):
            await store.fence("")


@pytest.mark.parametrize("num_units", [1, 2])
async def test_a_stage_that_begins_again_writes_what_was_erased_and_earlier_ones_write_no_more(
    opened_storage, num_units: int
) -> None:
    spans = Spans("scorer", None)

    async with opened_storage(num_units) as (units, store):
        lost, first, second = (RecordingStore(store.signed(f"score/{i}"), spans) for i in range(3))
        await store.write([1, 2, 3, 4], rows([1, 2, 3, 4]))
        await lost.write([1, 4], numbers(REWARD, 0.1, 0.4))
        await store.fence("score/0")
        await store.erase([1, 2, 1], [REWARD, REWARD])
        await lost.write([2], numbers(REWARD, 0.2))
        for row_id in (1, 2):
            with pytest.raises(KeyError):
                await store.read([row_id], [REWARD])
        await first.write([1, 2], numbers(REWARD, 1.1, 1.2))
        with pytest.raises(RuntimeError, match="row 1 already has column reward"):
            await first.write([1], numbers(REWARD, 1.1))
        await store.fence("score/1")
        await store.erase([2], [REWARD])
        await first.write([2, 3], numbers(REWARD, 1.2, 1.3))
        await second.write([2, 3], numbers(REWARD, 2.2, 2.3))
        found = await store.read([1, 2, 3, 4], [REWARD])
        assert [cell.item() for cell in found[REWARD]] == [1.1, 2.2, 2.3, 0.4]
        assert_same(await store.read([1, 2, 3, 4], NAMES), rows([1, 2, 3, 4]))
        await store.erase([1, 9], ["quality"])  # no call has written such a column
        await store.retire([1, 2, 3, 4], {"outcome": "trained"})
        slabs = [slab for unit in units for slab in unit._slabs.by_number.values()]
        assert all(slab.num_cells == slab.live_bytes == 0 for slab in slabs)


async def test_retired_rows_leave_a_line_each(opened_storage, tmp_path: Path) -> None:
    outcome = {"outcome": "trained", "version": 5, "oldest_version": 2, "group_id": 8}

    async with opened_storage(2, archive_folder=str(tmp_path)) as (_, store):
        sampling = np.array([1.0, 0, 1.0, 512, 2**52 + 1, FINISH_CODES[FinishReason.STOP]])
        mixed = rows([1], 4) | {TOKEN_VERSIONS: [np.array([2, 2, 4, 4, 4], np.int32)]}
        mixed[SAMPLING] = [sampling]
        await store.write([1], mixed | numbers(REWARD, 1.5) | numbers(PROMPT_ID, 7))
        await store.write([3], rows([3], 2, FinishReason.LENGTH) | numbers(REWARD, float("nan")))
        await store.write([5], numbers(REWARD, 0))
        await store.retire([1, 3], outcome)
        await store.retire([5], {"outcome": "dropped", "reason": "failed"})

    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 512, "seed": 2**52 + 1}
    lines = (tmp_path / "rollouts-1.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert first == {
        "row_id": 1,
        **outcome,
        "prompt_id": 7,
        "num_prompt_tokens": 1,
        "num_tokens": 5,
        "spans": [[2, 2], [4, 3]],
        "finish": "stop",
        "reward": 1.5,
        "sampling": sampling,
    }
    assert (second["finish"], second["reward"], second["num_tokens"]) == ("length", None, 2)
    assert (third["outcome"], third["reason"], third["num_tokens"]) == ("dropped", "failed", 0)
    assert second["spans"] == [[0, 1], [1, 1]]
    assert (third["spans"], third["finish"], third["sampling"]) == ([], None, None)


async def test_a_full_disk_is_one_clear_error(opened_storage, tmp_path: Path) -> None:
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    folders = {"archive_folder": str(tmp_path), "spill_folder": str(spilled)}
    async with opened_storage(**folders) as (units, store):
        full = Path("/dev/full").open("a")  # noqa: SIM115 - the unit closes it
        units[0]._archive._files[0] = full
        await store.write([1], rows([1], 2))
        match = "cannot write the archive of rollouts: No space left"
        with pytest.raises(OSError, match=match) as raised:
            await store.retire([1], {"outcome": "trained"})
        assert raised.value.filename == str(tmp_path / "rollouts-0.jsonl")
        with pytest.raises(OSError, match="No space left"):  # of what it still had to write
            await units[0].close()
        assert not spilled.exists()
        assert not units[0]._slabs.by_number
        await units[0].close()


async def test_with_an_episode_its_further_conversations_are_retired(
    opened_storage, tmp_path: Path
) -> None:
    further = [conversation_row(5, k) for k in (1, 4)]
    async with opened_storage(3, archive_folder=str(tmp_path)) as (units, store):
        cells = rows([5, 7, 8, 6], 3)
        await store.write([5, *further, 6], cells)
        usages = [await unit.usage() for unit in units]
        assert [usage["num_rows"] for usage in usages] == [1, 0, 3], "an episode is in one unit"
        assert_same(await store.read(further[::-1], NAMES), rows([8, 7], 3))
        await store.retire([5], {"outcome": "lost"})
        await store.write([5, further[0]], rows([5, 7], 3))  # it begins again
        await store.retire([6, 5], {"outcome": "trained"})
        assert (await store.usage())["num_rows"] == 0
    text = (tmp_path / "rollouts-2.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    found = [(line["outcome"], line["row_id"], line.get("conversation")) for line in lines]
    first = [("lost", 5, None), ("lost", further[0], 1), ("lost", further[1], 4)]
    assert found == [*first, ("trained", 5, None), ("trained", further[0], 1)]
    assert {line.get("episode", 5) for line in lines} == {5}
