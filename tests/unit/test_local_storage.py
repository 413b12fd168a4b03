"""Storage as clients on the unit's own host reach it: a socket, and arrays in shared memory."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from llamarl.errors import ExecutorLost
from llamarl.metrics.span import Spans
from llamarl.storage.channel import MAX_FILES, MAX_PACKET_BYTES
from llamarl.storage.slabs import FULL_BYTES
from llamarl.storage.store import RecordingStore, Store
from llamarl.storage.unit import Unit
from llamarl.types import REF_LOGPROBS, RESPONSE_IDS, REWARD, Columns, FinishReason
from tests.json_lines import read_lines
from tests.unit.stored_rows import NAMES, assert_same, new_unit, rows, serving

DTYPES = st.sampled_from([np.int32, np.float32, np.float64, np.int64])
TRAINED = {"outcome": "trained", "version": 1}


def columns_of(num_rows: int) -> st.SearchStrategy[Columns]:
    cells = DTYPES.flatmap(
        lambda dtype: st.lists(
            nps.arrays(dtype, st.integers(0, 30)), min_size=num_rows, max_size=num_rows
        )
    )
    return st.dictionaries(st.from_regex("[a-z]{9}", fullmatch=True), cells, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6).flatmap(columns_of), st.randoms())
def test_any_numbers_arrive_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, columns: Columns, random
) -> None:
    row_ids = list(range(len(next(iter(columns.values())))))

    async def scenario(folder: Path) -> None:
        async with serving(folder) as (_, store):
            await store.write(row_ids, columns)
            order = random.sample(row_ids, len(row_ids))
            names = random.sample(list(columns), len(columns))
            wanted = {name: [columns[name][row_id] for row_id in order] for name in names}
            assert_same(await store.read(order, names), wanted)

    asyncio.run(scenario(tmp_path_factory.mktemp("unit")))


@pytest.mark.parametrize("num_tokens", [1, 40, 900, 9000])
def test_rows_come_back_whatever_their_size_and_in_whatever_writes_they_came(
    tmp_path: Path, num_tokens: int
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            for first in range(0, 90, 9):
                some = list(range(first, first + 9))
                await store.write(some, rows(some, num_tokens))
                scores = [np.array([row_id / 2]) for row_id in some]
                await store.write(some, {REWARD: scores})
            asked = [int(i) for i in np.random.default_rng(0).permutation(90)]
            assert_same(await store.read(asked, NAMES), rows(asked, num_tokens))
            assert_same(await store.read(asked[:1], NAMES), rows(asked[:1], num_tokens))
            found = await store.read(asked, [REWARD])
            assert [cell.item() for cell in found[REWARD]] == [row_id / 2 for row_id in asked]
            await store.retire(asked, TRAINED)
            unit._slabs.drop_spares()
            assert (await unit.usage())["memory_bytes"] < FULL_BYTES

    asyncio.run(scenario())


def test_a_large_write_becomes_a_slab_without_a_copy_and_is_read_in_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            wanted = rows([1, 2, 3], 100_000)
            before = unit._slabs.memory_bytes
            await store.write([1, 2, 3], wanted)
            (slab,) = unit._slabs.by_number.values()
            assert slab is not unit._slabs.shared
            found = await store.read([1, 2, 3], NAMES)
            assert unit._slabs.memory_bytes - before == slab.num_bytes
            # Written over behind the unit's back, only to see that reader and unit share it.
            place = os.pread(slab.file, slab.num_bytes, 0).index(b"\3\0\0\0\3\0\0\0\3\0\0\0")
            os.pwrite(slab.file, b"\7", place)
            assert found[RESPONSE_IDS][2][0] == 7

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [5, 50_000])
def test_what_was_read_stays_readable_after_its_rows_are_retired_and_cannot_be_written(
    tmp_path: Path, num_tokens: int
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            await store.write([4, 5], rows([4, 5], num_tokens))
            found = await store.read([4, 5], NAMES)
            await store.retire([4, 5], TRAINED)
            await store.write([6, 7], rows([6, 7], num_tokens))
            gc.collect()
            assert_same(found, rows([4, 5], num_tokens))
            with pytest.raises(ValueError, match="read-only"):
                found[RESPONSE_IDS][0][0] = 1

    asyncio.run(scenario())


def test_memory_follows_the_rows_that_are_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            row_ids = list(range(400))
            for first in range(0, 400, 40):
                some = row_ids[first : first + 40]
                await store.write(some, rows(some, 2000))
            random = np.random.default_rng(1)
            left = [int(i) for i in random.permutation(400)]
            while len(left) > 10:
                gone, left = left[:30], left[30:]
                await store.retire(gone, TRAINED)
                unit._slabs.drop_spares()
                usage = await unit.usage()
                assert usage["num_rows"] == len(left)
                assert usage["memory_bytes"] <= 2 * len(left) * 2003 * 12 + 2 * FULL_BYTES
                assert_same(await store.read(left, NAMES), rows(left, 2000))
            await store.retire(left, TRAINED)
            unit._slabs.drop_spares()
            assert all(slab is unit._slabs.shared for slab in unit._slabs.by_number.values())

    asyncio.run(scenario())


def test_a_call_leaves_no_file_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            num_open = -1
            for turn in range(5):
                some = list(range(20 * turn, 20 * turn + 20))
                for row_id in some:
                    await store.write([row_id], rows([row_id], 20_000))
                found = await store.read(some, NAMES)
                assert_same(found, rows(some, 20_000))
                del found
                await store.retire(some, TRAINED)
                gc.collect()
                now = len(os.listdir("/proc/self/fd"))
                num_open = now if num_open < 0 else num_open
                assert now <= num_open + 1

    asyncio.run(scenario())


def test_rows_of_more_slabs_than_a_packet_has_files_are_read_too(tmp_path: Path) -> None:
    num_tokens = MAX_PACKET_BYTES // 8

    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            row_ids = list(range(MAX_FILES + 10))
            for row_id in row_ids:
                await store.write([row_id], rows([row_id], num_tokens))
            assert len(unit._slabs.by_number) > MAX_FILES
            assert_same(await store.read(row_ids, NAMES), rows(row_ids, num_tokens))

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [10, 5000])
def test_arrays_with_gaps_arrive_too(tmp_path: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            columns = {"quality": [np.arange(3 * num_tokens)[::3], np.arange(4)]}
            await store.write([1, 2], columns)
            assert_same(await store.read([1, 2], ["quality"]), columns)

    asyncio.run(scenario())


def test_errors_are_those_of_the_unit_and_nothing_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            await store.write([1], rows([1]))
            with pytest.raises(RuntimeError, match="row 1 already has column prompt_ids") as raised:
                await store.write([2, 1], rows([2, 1]))
            assert "raised in storage-0" in raised.value.__notes__[0]
            with pytest.raises(KeyError, match="row 2 is not stored"):
                await store.read([2], [RESPONSE_IDS])
            with pytest.raises(KeyError, match="row 1 has no column reward, only"):
                await store.read([1], [REWARD])
            with pytest.raises(ValueError, match="reward must be 1-D float64, got float32"):
                await store.write([1], {REWARD: [np.zeros(1, np.float32)]})
            with pytest.raises(ValueError, match='an outcome must have the key "outcome"'):
                await store.retire([1], {"version": 3})
            wrong = [np.array(["a"])], [np.array([1j])], [np.zeros(1), np.zeros(1, np.int32)]
            for cells in wrong:
                with pytest.raises(ValueError, match="column quality must hold"):
                    await store.write(list(range(len(cells))), {"quality": cells})
            assert (await store.usage())["num_rows"] == 1

    asyncio.run(scenario())


def test_partial_rollouts_are_written_again_and_give_their_memory_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            for num_tokens in (10_000, 20_000, 30_000):
                await store.write([1, 2], rows([1, 2], num_tokens, FinishReason.SEGMENT))
            await store.write([1, 2], rows([1, 2], 40_000))
            assert_same(await store.read([2, 1], NAMES), rows([2, 1], 40_000))
            unit._slabs.drop_spares()
            assert (await store.usage())["memory_bytes"] < 2 * 40_010 * 12 + FULL_BYTES / 4
            with pytest.raises(RuntimeError, match="is not partial"):
                await store.write([2], rows([2], 40_000))
            logprobs = {REF_LOGPROBS: [np.ones(40_001, np.float32)]}
            await store.write([1], logprobs)
            assert_same(await store.read([1], [REF_LOGPROBS]), logprobs)

    asyncio.run(scenario())


def test_many_calls_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            clients = [store, *(pickle.loads(pickle.dumps(one)) for one in [unit_of(store)] * 3)]
            row_ids = list(range(200))
            await asyncio.gather(
                *(clients[i % 4].write([i], rows([i], 10 + 40 * i)) for i in row_ids)
            )
            found = await asyncio.gather(*(clients[i % 4].read([i], NAMES) for i in row_ids))
            for row_id, columns in zip(row_ids, found, strict=True):
                assert_same(columns, rows([row_id], 10 + 40 * row_id))

    asyncio.run(scenario())


def unit_of(store: Store) -> Unit:
    (unit,) = store._units
    assert isinstance(unit, Unit)
    return unit


def test_only_this_user_can_connect_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 90) / ("b" * 90)

    async def scenario() -> None:
        async with serving(folder) as (_, store):
            socket = folder / "s" / "0"
            assert stat.S_IMODE(socket.stat().st_mode) == 0o600
            assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
            await store.write([1], rows([1]))
        assert not (folder / "s").exists()

    asyncio.run(scenario())


def test_a_socket_that_a_killed_session_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "0").touch()

    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            assert (await store.usage())["num_rows"] == 0

    asyncio.run(scenario())


def test_a_unit_that_hangs_up_is_named_and_its_calls_say_why(tmp_path: Path) -> None:
    class Ended:
        async def usage(self) -> dict[str, int]:
            raise ExecutorLost("storage-0", 0, "sig=9")

    class Silent:
        async def usage(self) -> dict[str, int]:
            return {}

    async def scenario() -> None:
        for calls, text in ((Ended(), "storage-0 rank 0: sig=9"), (Silent(), "storage-0: it hung")):
            unit = new_unit(tmp_path)
            await unit.start()
            client = Unit("storage-0", calls, str(tmp_path / "s" / "0"))
            await client.write([1], rows([1]))
            reading = asyncio.ensure_future(client.read([1], NAMES))
            await asyncio.sleep(0)
            await unit.close()
            with pytest.raises(ExecutorLost, match=text):
                await reading
            with pytest.raises(ExecutorLost, match=text):
                await client.read([1], NAMES)

    asyncio.run(scenario())


def test_a_caller_that_is_cancelled_as_its_unit_is_found_lost_is_cancelled(tmp_path: Path) -> None:
    class Lost:
        def __init__(self) -> None:
            self.found = asyncio.get_running_loop().create_future()

        async def usage(self) -> dict[str, int]:
            return await self.found

    async def scenario() -> None:
        unit, calls = new_unit(tmp_path), Lost()
        await unit.start()
        client = Unit("storage-0", calls, str(tmp_path / "s" / "0"))
        await client.write([1], rows([1]))
        await unit.close()
        reading = asyncio.ensure_future(client.read([1], NAMES))
        while not calls.found._callbacks:  # until it asks why
            await asyncio.sleep(0)
        calls.found.set_exception(ExecutorLost("storage-0", 0, "sig=9"))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(scenario())


def test_a_unit_without_a_socket_serves_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "s").touch()  # a file where the socket's folder should be
        unit = new_unit(tmp_path)
        await unit.start()
        store = Store([Unit("storage-0", unit, str(tmp_path / "s" / "0"))])
        await store.write([1], rows([1]))
        assert_same(await store.read([1], NAMES), rows([1]))
        await unit.close()

    asyncio.run(scenario())


def test_what_goes_through_a_recording_store_is_marked_with_rows_and_bytes(tmp_path: Path) -> None:
    spans = Spans("scorer-0", tmp_path)

    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            recording = RecordingStore(store, spans)
            await recording.write([3, 6], rows([3, 6], 10))
            assert_same(
                await recording.read([6, 3], NAMES[1:]),
                {name: cells for name, cells in rows([6, 3], 10).items() if name in NAMES[1:]},
            )
            await recording.read([], [REWARD])

    asyncio.run(scenario())
    spans.close()
    lines = read_lines(tmp_path / "scorer-0.jsonl")
    marks = [line for line in lines if line.get("name") in ("put", "get")]
    assert {line["cat"] for line in marks} == {"mark"}
    assert [(line["name"], line["rows"]) for line in marks] == [("put", 2), ("get", 2), ("get", 0)]
    sizes = {name: sum(c.nbytes for c in cells) for name, cells in rows([3, 6], 10).items()}
    assert marks[0]["bytes"] == sizes
    assert marks[1]["bytes"] == {name: sizes[name] for name in NAMES[1:]}
    assert marks[2]["bytes"] == {}
