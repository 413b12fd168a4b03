"""Memory that is written again: several times as fast as new memory, and never while a reader may
still look at it."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from llamarl.core.records import Columns
from llamarl.storage.table import SPARE_BYTES
from tests.unit.stored_rows import NAMES, assert_same, client, rows, serving

TRAINED = {"outcome": "trained", "version": 1}


@pytest.mark.full
def test_memory_of_retired_rows_is_written_again_but_never_under_a_readers_eyes(
    tmp_path: Path,
) -> None:
    num_tokens, random = 20_000, np.random.default_rng(2)

    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            reader = client("near", unit)
            kept: list[tuple[list[int], Columns]] = []
            files: list[tuple[int, int]] = []
            for turn in range(40):
                some = [10 * turn + i for i in range(3)]
                await store.write(some, rows(some, num_tokens))
                slab = list(unit._slabs.by_number.values())[-1]
                files.append((os.fstat(slab.file).st_ino, turn))
                if turn % 3:  # else it is not looked at
                    kept.append((some, await reader.read(some, NAMES)))
                await store.retire(some, TRAINED)
                while len(kept) > 4:
                    kept.pop(int(random.integers(len(kept))))
                    gc.collect()
                for row_ids, columns in kept:
                    assert_same(columns, rows(row_ids, num_tokens))
            num_files = len({inode for inode, _ in files})
            assert num_files < 20  # of 40 writes: most memory was written more than once
            assert (await unit.usage())["memory_bytes"] < 20 * 3 * num_tokens * 13

    asyncio.run(scenario())


def test_a_reader_whose_call_was_cancelled_or_that_has_gone_spoils_no_others_rows(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_empty_memory_is_kept_up_to_a_limit_and_given_back_before_anything_is_spilled(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_small_rows_are_read_though_a_large_write_before_them_was_retired(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (_, store):
            await store.write([0, 1], rows([0, 1], 3000))
            await store.write([100], rows([100], 3000))
            await store.retire([0, 1], TRAINED)
            assert_same(await store.read([100], NAMES), rows([100], 3000))

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [4, 30_000])
def test_memory_that_a_writer_holds_when_it_is_fenced_never_comes_into_a_row(
    tmp_path: Path, num_tokens: int
) -> None:
    """Small rows travel in a packet; large ones in a file, which storage may have lent: the memory
    of rows that were retired. The writer fills it and is fenced before it has sent it."""

    async def scenario() -> None:
        async with serving(tmp_path) as (unit, store):
            lost = client("near", unit)
            await lost.write([1, 2], rows([1, 2], num_tokens), "generator-0/a")
            await store.retire([1, 2], {"outcome": "trained"})
            await lost.write([3, 4], rows([3, 4], num_tokens), "generator-0/a")
            is_lent = lost._connection._spare is not None
            assert is_lent == (num_tokens > 4)
            await unit.fence("generator-0/a")
            await store.write([5, 6], rows([5, 6], num_tokens), "generator-1/b")
            await lost.write([1, 5, 7], rows([1, 5, 7], num_tokens), "generator-0/a")
            assert (await store.usage())["num_rows"] == 4
            assert_same(await store.read([3, 4, 5, 6], NAMES), rows([3, 4, 5, 6], num_tokens))
            lost.close()

    asyncio.run(scenario())
