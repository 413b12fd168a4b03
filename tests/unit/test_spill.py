"""Rows that a storage unit moves to disk, and what happens when that is full."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.records import REWARD, FinishReason
from llamarl.storage import table as spill_module
from llamarl.storage import worker as storage_module
from llamarl.storage.table import FULL_BYTES
from tests.unit.stored_rows import NAMES, assert_same, rows, serving

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


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4, 20_000), (60, 900)])
def test_ten_times_the_limit_pass_through_and_every_row_is_read_exactly(
    tmp_path: Path, num_rows: int, num_tokens: int
) -> None:
    limit_bytes = 8 * MIB

    async def scenario() -> None:
        folder = str(tmp_path / "spill")
        async with serving(tmp_path, spill_folder=folder, max_bytes=limit_bytes) as (unit, store):
            row_ids, most, turns = [], 0, 0
            while (await unit.usage())["spilled_bytes"] < 9 * limit_bytes:
                some = [len(row_ids) + i for i in range(num_rows)]
                await store.write(some, rows(some, num_tokens))
                await store.write(some, {REWARD: [np.array([float(i)]) for i in some]})
                row_ids += some
                turns += 1
                most = max(most, unit._slabs.memory_bytes)
            assert most <= limit_bytes
            assert (await unit.usage())["is_full"] == 0
            assert os.listdir(folder) == []  # what is there has no name
            assert disk_bytes(tmp_path) >= 9 * limit_bytes
            order = [int(i) for i in np.random.default_rng(0).permutation(row_ids)]
            for first in range(0, len(order), 64):
                some = order[first : first + 64]
                assert_same(await store.read(some, NAMES), rows(some, num_tokens))
                assert (await store.read(some, [REWARD]))[REWARD][0] == [float(some[0])]
                await store.retire(some, TRAINED)
            assert (await unit.usage())["spilled_bytes"] == 0
            assert disk_bytes(tmp_path) == 0
        assert not (tmp_path / "spill").exists()

    asyncio.run(scenario())


def test_what_is_not_complete_stays_in_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, spill_folder=str(tmp_path / "d"), max_bytes=1) as (
            unit,
            store,
        ):
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

    asyncio.run(scenario())


def test_a_full_disk_costs_no_row_and_is_said_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spill_module, "PAUSE_S", 0.0)
    folder = str(tmp_path / "spill")

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_made_is_like_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def scenario() -> None:
        folder = str(tmp_path / "file" / "spill")
        async with serving(tmp_path, spill_folder=folder, max_bytes=MIB) as (unit, store):
            for row_id in range(4):
                await store.write([row_id], rows([row_id], 60_000))
            assert (await unit.usage())["is_full"] == 1
            assert_same(await store.read([3, 0], NAMES), rows([3, 0], 60_000))
            assert len(caplog.records) == 1
            await store.retire([0, 1, 2], TRAINED)
            assert (await unit.usage())["is_full"] == 0

    asyncio.run(scenario())


def test_next_to_no_memory_left_counts_as_over_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "cut", "reward", "read", "retire", "lose"]),
        st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True),
        st.sampled_from([3, 300, 3000, 30_000]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([0, 1, 300_000]))
def test_whatever_comes_in_whatever_order_the_rows_are_those_written_last(
    tmp_path_factory: pytest.TempPathFactory, steps: list, limit_bytes: int
) -> None:
    async def scenario(folder: Path) -> None:
        full: dict[int, int] = {}  # row -> its tokens
        cut: dict[int, int] = {}
        rewarded, fresh = set[int](), itertools.count(100)
        spec = {"spill_folder": str(folder / "spill"), "max_bytes": limit_bytes}
        async with serving(folder, **spec) as (unit, store):
            for step, some, num_tokens in steps:
                if step in ("write", "cut"):
                    some = [i for i in some if i not in full] or [next(fresh)]
                    reason = FinishReason.SEGMENT if step == "cut" else FinishReason.STOP
                    await store.write(some, rows(some, num_tokens, reason))
                    for row_id in some:
                        cut.pop(row_id, None)
                        (cut if step == "cut" else full)[row_id] = num_tokens
                elif step == "reward":
                    some = [i for i in some if i in full and i not in rewarded]
                    await store.write(some, {REWARD: [np.array([i / 7]) for i in some]})
                    rewarded |= set(some)
                elif step == "read":
                    for row_id in some:
                        if row_id in full:
                            wanted = rows([row_id], full[row_id])
                            assert_same(await store.read([row_id], NAMES), wanted)
                else:
                    await store.retire(some, {"outcome": "lost" if step == "lose" else "trained"})
                    for row_id in some:
                        full.pop(row_id, None), cut.pop(row_id, None)
                        rewarded.discard(row_id)
            names = NAMES[:4]
            for row_id, num_tokens in (full | cut).items():
                assert_same(
                    await store.read([row_id], names),
                    {name: rows([row_id], num_tokens)[name] for name in names},
                )
            usage = await unit.usage()
            assert usage["num_rows"] == len(full) + len(cut)
            await store.retire([*full, *cut], TRAINED)
            unit._slabs.drop_spares()
            usage = await unit.usage()
            assert usage["spilled_bytes"] == 0
            assert usage["memory_bytes"] <= FULL_BYTES

    asyncio.run(scenario(tmp_path_factory.mktemp("unit")))
