"""Storage by a socket and shared memory on the unit's own host, and by calls from other hosts."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest

from llamarl.cluster.sockets import MAX_FILES, MAX_PACKET_BYTES
from llamarl.core.errors import ExecutorLost
from llamarl.core.records import GENERATOR_LOGPROBS, RESPONSE_IDS, REWARD, TOKEN_VERSIONS
from llamarl.metrics.span import Spans
from llamarl.storage.client import MESSAGE_BYTES, RecordingStore, Store, Unit
from llamarl.storage.columns import PackedColumns
from tests.json_lines import read_lines
from tests.storage.stored_rows import NAMES, assert_same, calls_elsewhere, new_unit, rows, serving

TRAINED = {"outcome": "trained", "version": 1}


async def test_a_large_write_becomes_a_slab_without_a_copy_and_is_read_in_place(
    tmp_path: Path,
) -> None:
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


async def test_a_call_leaves_no_file_open(tmp_path: Path) -> None:
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


async def test_rows_of_more_slabs_than_a_packet_has_files_are_read_too(tmp_path: Path) -> None:
    num_tokens = MAX_PACKET_BYTES // 8
    async with serving(tmp_path) as (unit, store):
        row_ids = list(range(MAX_FILES + 10))
        for row_id in row_ids:
            await store.write([row_id], rows([row_id], num_tokens))
        assert len(unit._slabs.by_number) > MAX_FILES
        assert_same(await store.read(row_ids, NAMES), rows(row_ids, num_tokens))


async def test_only_this_user_can_connect_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 90) / ("b" * 90)
    async with serving(folder) as (_, store):
        socket = folder / "s" / "0"
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        await store.write([1], rows([1]))
    assert not (folder / "s").exists()


async def test_a_socket_that_a_killed_session_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "0").touch()
    async with serving(tmp_path) as (_, store):
        assert (await store.usage())["num_rows"] == 0


async def test_a_unit_that_hangs_up_is_named_and_its_calls_say_why(tmp_path: Path) -> None:
    class Ended:
        async def usage(self) -> dict[str, int]:
            raise ExecutorLost("storage-0", 0, "sig=9")

    class Silent:
        async def usage(self) -> dict[str, int]:
            return {}

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


async def test_a_caller_that_is_cancelled_as_its_unit_is_found_lost_is_cancelled(
    tmp_path: Path,
) -> None:
    class Lost:
        def __init__(self) -> None:
            self.found = asyncio.get_running_loop().create_future()

        async def usage(self) -> dict[str, int]:
            return await self.found

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


async def test_a_unit_without_a_socket_serves_calls(tmp_path: Path) -> None:
    (tmp_path / "s").touch()  # a file where the socket's folder should be
    unit = new_unit(tmp_path)
    await unit.start()
    store = Store([Unit("storage-0", unit, str(tmp_path / "s" / "0"))])
    await store.write([1], rows([1]))
    assert_same(await store.read([1], NAMES), rows([1]))
    await unit.close()


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


async def test_clients_elsewhere_call_in_messages_of_a_limited_size(tmp_path: Path) -> None:
    sizes: list[int] = []
    calls = calls_elsewhere(new_unit(tmp_path), sizes)
    store = Store([Unit("storage-0", calls, str(tmp_path / "nowhere" / "0"))])
    row_ids = list(range(50))
    await store.write(row_ids, rows(row_ids, 100_000))
    assert_same(await store.read(row_ids, NAMES), rows(row_ids, 100_000))
    assert len(sizes) == 18  # six rows in each
    assert max(sizes) < 1.01 * MESSAGE_BYTES
    await store.write([99], rows([99], MESSAGE_BYTES // 8))  # a row is never split
    found, large = await store.read([99, 1], NAMES), rows([99], MESSAGE_BYTES // 8)
    small = rows([1], 100_000)
    assert_same(found, {name: [*large[name], *small[name]] for name in NAMES})


async def test_clients_behind_a_slow_link_write_what_they_write_in_half_the_bytes(
    tmp_path: Path,
) -> None:
    rng, lengths = np.random.default_rng(0), [700, 900, 1100]
    sent = rows([0, 1, 2])
    sent[RESPONSE_IDS] = [rng.integers(0, 128_000, n).astype(np.int32) for n in lengths]
    sent[GENERATOR_LOGPROBS] = [-rng.exponential(0.5, n).astype(np.float32) for n in lengths]
    sent[TOKEN_VERSIONS] = [np.full(n, 7, np.int32) for n in lengths]
    sizes: list[int] = []
    for is_far in (False, True):
        unit = new_unit(tmp_path)
        client = pickle.loads(pickle.dumps(Unit("storage-0", None, "nowhere", is_far=is_far)))
        client._calls = calls_elsewhere(unit, sizes)
        await client.write([0, 1, 2], sent)
        assert_same(await unit.read([0, 1, 2], NAMES), sent)
    assert sizes[1] <= 0.55 * sizes[0]


def test_a_message_is_hardly_larger_than_its_arrays() -> None:
    lengths = np.random.default_rng(0).integers(0, 64, 2000)
    columns = {RESPONSE_IDS: [np.arange(n, dtype=np.int32) for n in lengths]}
    num_bytes, message = 4 * int(lengths.sum()), pickle.dumps(PackedColumns(columns))
    assert len(message) <= num_bytes + 4 * len(lengths) + 500
    assert len(pickle.dumps(columns)) > num_bytes + 20 * len(lengths)  # else why
    assert type(pickle.loads(message)) is dict
