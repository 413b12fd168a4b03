"""Memory of a storage unit: rows that move to disk, a full disk, and memory that is written again,
but never while a reader may still look at it."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamarl.core.records import FinishReason
from llamarl.storage import table as spill_module
from llamarl.storage import worker as storage_module
from llamarl.storage.table import FULL_BYTES, SPARE_BYTES
from tests.storage.stored_rows import NAMES, assert_same, client, rows, serving

MIB = 1024 * 1024
TRAINED = {"outcome": "trained", "version": 1}


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file, in memory or on disk, grows beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disk_bytes(folder: Path) -> int:
    """Of files without a name that this process has open below a folder."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        target = os.readlink(path) if os.path.islink(path) else ""
        if target.startswith(str(folder)) and target.endswith(" (deleted)"):
            total += os.stat(path).st_size
    return total


async def test_what_is_not_complete_stays_in_memory(tmp_path: Path) -> None:
    async with serving(tmp_path, spill_folder=str(tmp_path / "d"), max_bytes=1) as (unit, store):
        cut = rows([1], 20_000, FinishReason.SEGMENT)
        await store.write([1], cut)
        await store.write([2], rows([2], 20_000))
        usage = await unit.usage()
        assert min(usage["memory_bytes"], usage["spilled_bytes"]) >= 20_000 * 12
        assert_same(await store.read([1], NAMES), cut)
        await store.write([1], rows([1], 30_000))
        assert_same(await store.read([1], NAMES), rows([1], 30_000))
        assert_same(await store.read([2], NAMES), rows([2], 20_000))
        assert (await unit.usage())["memory_bytes"] == 0


async def test_a_full_disk_costs_no_row_and_is_said_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spill_module, "PAUSE_S", 0.0)
    folder = str(tmp_path / "spill")
    async with serving(tmp_path, spill_folder=folder, max_bytes=MIB) as (unit, store):
        with full_disk(3 * FULL_BYTES):  # a file on disk takes less than three slabs
            for row_id in range(40):
                await store.write([row_id], rows([row_id], 60_000))
            usage = await unit.usage()
            assert usage["is_full"] == 1
            assert usage["memory_bytes"] > 3 * FULL_BYTES
            assert usage["spilled_bytes"] > FULL_BYTES
            assert disk_bytes(tmp_path) == usage["spilled_bytes"]  # no half of a slab is left
            for row_id in range(40):
                assert_same(await store.read([row_id], NAMES), rows([row_id], 60_000))
        first, tenth = caplog.messages
        assert first.startswith(f"{folder} takes no rollouts (File too large)")
        assert tenth == f"{first} (10 times so far)"
        await store.write([99], rows([99], 60_000))  # and the disk has room again
        usage = await unit.usage()
        assert (usage["is_full"], usage["num_rows"]) == (0, 41)
        assert usage["memory_bytes"] <= MIB
        row_ids = [*range(40), 99]
        for row_id in row_ids:
            assert_same(await store.read([row_id], NAMES), rows([row_id], 60_000))


async def test_no_folder_is_like_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "spill")
    async with serving(tmp_path, spill_folder=folder, max_bytes=MIB) as (unit, store):
        for row_id in range(4):
            await store.write([row_id], rows([row_id], 60_000))
        assert (await unit.usage())["is_full"] == 1
        assert_same(await store.read([3, 0], NAMES), rows([3, 0], 60_000))
        assert len(caplog.records) == 1
        await store.retire([0, 1, 2], TRAINED)
        assert (await unit.usage())["is_full"] == 0


def test_next_to_no_memory_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(folder: str | None) -> dict[str, int]:
        async with serving(tmp_path, spill_folder=folder) as (unit, store):
            await store.write([1], rows([1], 60_000))
            assert (await unit.usage())["is_full"] == 0
            monkeypatch.setattr(storage_module, "RESERVE_BYTES", 2**60)
            usage = await unit.usage()
            assert_same(await store.read([1], NAMES), rows([1], 60_000))
            monkeypatch.undo()
            return usage

    usage = asyncio.run(scenario(str(tmp_path / "spill")))
    assert (usage["is_full"], usage["memory_bytes"]) == (0, 0)
    usage = asyncio.run(scenario(None))
    assert (usage["is_full"], usage["spilled_bytes"]) == (1, 0)


async def test_a_reader_that_was_cancelled_or_has_gone_spoils_no_others_rows(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (unit, store):
        gone = client("near", unit)
        await store.write([1, 2], rows([1, 2], 20_000))
        reading = asyncio.ensure_future(gone.read([1], NAMES))
        await asyncio.sleep(0)
        reading.cancel()
        kept = await gone.read([2], NAMES)
        gone._connection.close()
        await store.retire([1, 2], TRAINED)
        for row_id in range(3, 30):
            await store.write([row_id], rows([row_id], 40_000))
            await store.retire([row_id], TRAINED)
        assert_same(kept, rows([2], 20_000))


async def test_empty_memory_is_given_back_before_anything_is_spilled(tmp_path: Path) -> None:
    folder, limit_bytes = str(tmp_path / "spill"), SPARE_BYTES + 2**20
    async with serving(tmp_path, spill_folder=folder, max_bytes=limit_bytes) as (unit, store):
        num_tokens = 1_000_000
        row_ids = list(range(16))
        for row_id in row_ids:
            await store.write([row_id], rows([row_id], num_tokens))
        await store.retire(row_ids, TRAINED)
        empty = await unit.usage()
        assert 0.8 * SPARE_BYTES < empty["memory_bytes"] <= SPARE_BYTES
        await store.write([99], rows([99], 3 * num_tokens))  # for which no spare one fits
        usage = await unit.usage()
        assert usage["spilled_bytes"] == 0
        assert usage["memory_bytes"] < 4 * num_tokens * 12
