"""Processes that write into a storage unit while they are stopped, fenced and woken at random."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from llamarl.core.records import Columns
from llamarl.storage import table as slabs_module
from llamarl.storage.client import Store
from llamarl.storage.worker import StorageWorker
from tests.random_search import case, searched
from tests.storage.storage_writer import stamped
from tests.storage.stored_rows import NAMES, assert_same, serving

pytestmark = pytest.mark.full

NUM_WRITERS = 3
NUM_EVENTS = 60
PACKET_BYTES = 8192  # larger writes travel as files
SIZES = 1, 20, 300, 3000, 30_000


@dataclass(eq=False)
class Writer:
    """One process under its present name, and the orders that it has not answered."""

    process: asyncio.subprocess.Process
    name: str
    open: dict[int, list[int]] = field(default_factory=dict)
    is_given_up: bool = False
    left_over: set[int] = field(default_factory=set)
    """Orders that it got under names that are fenced."""

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Search:
    """What the unit should hold: by row, the entries and the stamp of whoever wrote it."""

    def __init__(self, unit: StorageWorker, store: Store, writers: list[Writer]) -> None:
        self.unit, self.store, self.writers = unit, store, writers
        self.order = self.stamp = self.next_row = 0
        self.ordered: dict[int, tuple[int, int]] = {}  # by row: entries, stamp
        self.done: set[int] = set()
        self.waiting: list[int] = []  # rows of lost writers, which nobody has begun again
        self.seen: list[tuple[Columns, Columns]] = []  # what was read in place, and copies of it
        self.num_found = self.num_left_over = 0

    async def run(self, rng: random.Random) -> None:
        self.rng = rng
        events = [self.give, self.give, self.give, self.lose, self.wake, self.retire, self.look]
        for _ in range(NUM_EVENTS):
            await rng.choice(events)()
            await asyncio.sleep(rng.choice([0.0, 0.0005, 0.003]))
        for writer in self.writers:
            await self.rise(writer)
        self.hand_on()
        async with asyncio.timeout(60):
            while any(writer.open or writer.left_over for writer in self.writers):
                await asyncio.sleep(0.001)
        assert self.ordered.keys() == self.done
        for row_id in self.ordered:
            await self.check([row_id])
        for in_place, copies in self.seen:
            assert_same(in_place, copies)
        assert (await self.unit.usage())["num_rows"] == len(self.done)
        await self.unit.retire([*self.done], {"outcome": "trained"})

    def awake(self) -> list[Writer]:
        return [writer for writer in self.writers if not writer.is_given_up]

    def order_rows(self, writer: Writer, row_ids: list[int]) -> None:
        self.order, self.stamp = self.order + 1, self.stamp + 1
        num_entries = self.rng.choice(SIZES)
        self.ordered |= dict.fromkeys(row_ids, (num_entries, self.stamp))
        writer.open[self.order] = row_ids
        line = json.dumps([self.order, writer.name, row_ids, num_entries, self.stamp])
        assert writer.process.stdin is not None
        writer.process.stdin.write(line.encode() + b"\n")

    def hand_on(self) -> None:
        """Others begin again with what lost writers had not stored."""
        if self.waiting and (awake := self.awake()):
            self.order_rows(self.rng.choice(awake), self.waiting)
            self.waiting = []

    def answered(self, writer: Writer, order: int, error: str) -> None:
        if order in writer.left_over:  # in vain or not, it says so without an error
            writer.left_over.remove(order)
            self.num_left_over += 1
        else:
            self.done.update(writer.open.pop(order))
        assert not error, error

    async def give(self) -> None:
        for writer in self.awake():
            first = self.next_row
            self.next_row += self.rng.randint(1, 4)
            self.order_rows(writer, [*range(first, self.next_row)])

    async def lose(self) -> None:
        """A writer is given up, stopped or not; what it has not stored goes to others."""
        if not (awake := self.awake()):
            return
        writer = self.rng.choice(awake)
        writer.is_given_up = True
        if self.rng.random() < 0.8:
            writer.signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.choice([0.0, 0.001]))
        held = [row_id for rows in writer.open.values() for row_id in rows]
        await self.unit.fence(writer.name)
        writer.left_over |= writer.open.keys()
        writer.open.clear()
        held = [row_id for row_id in held if row_id not in self.done]
        found = {row.row_id for row in await self.unit.find(held)}
        self.num_found += len(found)
        self.done |= found
        lost = [row_id for row_id in held if row_id not in found]
        await self.unit.retire(lost, {"outcome": "lost"})
        self.waiting += lost
        self.hand_on()
        await self.check([*found])

    async def wake(self) -> None:
        if asleep := [writer for writer in self.writers if writer.is_given_up]:
            await self.rise(self.rng.choice(asleep))

    async def rise(self, writer: Writer) -> None:
        """It goes on with what it was ordered, and under another name with more."""
        writer.signal(signal.SIGCONT)
        if writer.is_given_up:
            self.stamp += 1
            writer.name, writer.is_given_up = f"{writer.name.partition('/')[0]}/{self.stamp}", False

    async def retire(self) -> None:
        """Their memory is lent to writers for what comes next."""
        row_ids = [row_id for row_id in sorted(self.done) if self.rng.random() < 0.5]
        await self.unit.retire(row_ids, {"outcome": "trained"})
        self.done.difference_update(row_ids)
        for row_id in row_ids:
            del self.ordered[row_id]

    async def look(self) -> None:
        row_ids = [row_id for row_id in sorted(self.done) if self.rng.random() < 0.3]
        await self.check(row_ids)
        self.seen = self.seen[-2:]  # so that memory of the others is lent again

    async def check(self, row_ids: list[int]) -> None:
        if not row_ids:
            return
        found = await self.store.read(row_ids, NAMES)
        for place, row_id in enumerate(row_ids):
            wanted = stamped([row_id], *self.ordered[row_id])
            assert_same({name: [cells[place]] for name, cells in found.items()}, wanted)
        copies = {name: [np.array(cell) for cell in cells] for name, cells in found.items()}
        self.seen.append((found, copies))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[list[Writer]]:
    """Processes that write to the unit in `folder`."""
    module, socket = "tests.storage.storage_writer", str(folder / "s" / "0")
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, socket, str(PACKET_BYTES), **pipes
        )
        for _ in range(NUM_WRITERS)
    ]
    try:
        yield [Writer(process, f"{i}/0") for i, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def play(seeds: list[int], folder: Path) -> tuple[int, int]:
    """(rows found of lost writers, orders that they finished after they were fenced) of all."""
    num_found = num_left_over = 0
    async with serving(folder) as (unit, store), started(folder) as writers:
        for number, seed in enumerate(seeds):
            rng = random.Random(seed)
            slabs_module.FULL_BYTES = rng.choice([1024, 65536])
            slabs_module.SPARE_BYTES = rng.choice([0, 2**20, 2**28])
            for index, writer in enumerate(writers):
                writer.name = f"{index}-{number}/0"
            search = Search(unit, store, writers)
            listening = [asyncio.create_task(listen(search, writer)) for writer in writers]
            with case(seed):
                playing = asyncio.create_task(search.run(rng))
                await asyncio.wait([playing, *listening], return_when=asyncio.FIRST_COMPLETED)
                for task in listening:
                    task.cancel()
                await asyncio.gather(*listening, return_exceptions=True)
                for task in listening:
                    assert task.cancelled() or task.result()
                await playing
            num_found += search.num_found
            num_left_over += search.num_left_over
    return num_found, num_left_over


async def listen(search: Search, writer: Writer) -> None:
    assert writer.process.stdout is not None
    while line := await writer.process.stdout.readline():
        search.answered(writer, *json.loads(line))
    raise AssertionError("a writer has ended")


@searched(few=20, many=400)
def test_whatever_moment_a_writer_is_stopped_at_each_row_is_of_one_writer(
    seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs_module, "FULL_BYTES", slabs_module.FULL_BYTES)
    monkeypatch.setattr(slabs_module, "SPARE_BYTES", slabs_module.SPARE_BYTES)
    num_found, num_left_over = asyncio.run(play(seeds, tmp_path))
    assert num_left_over > len(seeds), "some were fenced amid their writes"
    assert num_found > 0 or len(seeds) < 20, "some had stored what they had not reported"
