"""A storage unit against a dictionary: random writes, reads and retirements in tiny slabs."""

from __future__ import annotations

import asyncio
import random
import tempfile
from typing import Any

import numpy as np
import pytest

from llamarl.errors import NotStored
from llamarl.executors.specs import StorageSpec
from llamarl.executors.storage import StorageExecutor
from llamarl.metrics.span import Spans
from llamarl.storage import slabs as slabs_module
from llamarl.storage import spill as spill_module
from llamarl.types import (
    REF_LOGPROBS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
)
from tests.random_search import case, searched
from tests.unit.stored_rows import NAMES, rows

NUM_OPERATIONS = 60
LATER = {REF_LOGPROBS: np.float32, REWARD: np.float64, TRAINER_LOGPROBS: np.float32}
Row = dict[str, np.ndarray]


class Search:
    """One unit and what it should hold: rows and those that are partial. The writer `number` is at
    work, all before it are fenced."""

    def __init__(self, unit: StorageExecutor, rng: random.Random) -> None:
        self.unit, self.rng = unit, rng
        self.rows: dict[int, Row] = {}
        self.partial: set[int] = set()
        self.number = 0
        self.next_id = 0
        self.tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> None:
        operations = [self.write, self.write, self.go_on, self.add_column, self.erase]
        operations += [self.retire, self.lose, self.write_fenced, self.read, self.find]
        for _ in range(NUM_OPERATIONS):
            await self.rng.choice(operations)()
            if self.rng.random() < 0.3:
                await asyncio.sleep(0.001)  # slabs move to disk meanwhile
        if self.rng.random() < 0.2:
            return  # the unit is closed amid what goes on
        for task in self.tasks:
            await task
        await self.compare([*self.rows])
        await self.unit.retire([*self.rows], {"outcome": "trained"})
        usage = await self.unit.usage()
        assert usage == {"num_rows": 0, "memory_bytes": usage["memory_bytes"], "spilled_bytes": 0,
                         "is_full": 0}  # fmt: skip

    def some(self, wanted: set[int] | None = None) -> list[int]:
        """A few of these rows, by default of all."""
        known = sorted(self.rows if wanted is None else wanted)
        return self.rng.sample(known, min(len(known), self.rng.randint(1, 5)))

    async def ask(self, call: Any) -> None:
        """Begin a call: it takes effect at once, and may go on while others begin."""
        self.tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0)

    async def put(self, row_ids: list[int], is_fenced: bool = False) -> None:
        """Write the columns of a generator."""
        if not row_ids:
            return
        finish = self.rng.choice([FinishReason.SEGMENT, FinishReason.STOP])
        columns = rows(row_ids, self.rng.randint(0, 40), finish)
        number = self.rng.randrange(self.number) if is_fenced else self.number
        await self.ask(self.unit.write(row_ids, columns, f"generator-0/{number}"))
        if not is_fenced:
            self.keep(row_ids, columns)
            change = self.partial.update if finish is FinishReason.SEGMENT else None
            (change or self.partial.difference_update)(row_ids)

    def keep(self, row_ids: list[int], columns: Columns) -> None:
        for place, row_id in enumerate(row_ids):
            cells = {name: column[place] for name, column in columns.items()}
            self.rows.setdefault(row_id, {}).update(cells)

    async def write(self) -> None:
        first = self.next_id
        self.next_id += self.rng.randint(1, 6)
        await self.put([*range(first, self.next_id)])

    async def go_on(self) -> None:
        """Partial rollouts are written again."""
        if row_ids := self.some(self.partial):
            await self.put(row_ids)

    async def add_column(self) -> None:
        name = self.rng.choice([*LATER])
        lacks = {i for i, row in self.rows.items() if name not in row or name == TRAINER_LOGPROBS}
        if row_ids := self.some(lacks):
            sizes = [1 if name == REWARD else self.rng.randint(0, 30) for _ in row_ids]
            columns = {name: [np.full(n, self.rng.random(), LATER[name]) for n in sizes]}
            await self.ask(self.unit.write(row_ids, columns))
            self.keep(row_ids, columns)

    async def erase(self) -> None:
        name = self.rng.choice([REF_LOGPROBS, REWARD])
        row_ids = self.some()
        await self.ask(self.unit.erase(row_ids, [name]))
        for row_id in row_ids:
            self.rows[row_id].pop(name, None)

    async def retire(self) -> None:
        row_ids = self.some()
        await self.ask(self.unit.retire(row_ids, {"outcome": "trained"}))
        self.forget(row_ids)

    async def lose(self) -> None:
        """Some of what the writer has written is written again by the next one."""
        await self.unit.fence(f"generator-0/{self.number}")
        self.number += 1
        row_ids = self.some()
        await self.ask(self.unit.retire(row_ids, {"outcome": "lost"}))
        self.forget(row_ids)
        if self.rng.random() < 0.5:
            await self.put(row_ids)

    async def write_fenced(self) -> None:
        """A replica that was given up writes: rows that are there, partial, retired, or new."""
        if self.number:
            most = self.next_id + 3
            row_ids = self.rng.sample(range(most), min(most, self.rng.randint(1, 5)))
            await self.put(row_ids, is_fenced=True)

    def forget(self, row_ids: list[int]) -> None:
        self.partial.difference_update(row_ids)
        for row_id in row_ids:
            del self.rows[row_id]

    async def read(self) -> None:
        await self.compare(self.some())
        absent = self.next_id + self.rng.randint(0, 3)
        with pytest.raises(NotStored):
            await self.unit.read([absent], [])

    async def compare(self, row_ids: list[int]) -> None:
        for row_id in row_ids:
            names = sorted(self.rows[row_id])
            found = await self.unit.read([row_id], names)
            for name in names:
                (cell,) = found[name]
                assert np.array_equal(cell, self.rows[row_id][name]), (row_id, name)
        whole = [i for i in row_ids if {*NAMES} <= {*self.rows[i]}]
        found = await self.unit.read(whole, NAMES) if whole else {}
        for name, cells in found.items():
            for row_id, cell in zip(whole, cells, strict=False):  # as many as fit in one answer
                assert np.array_equal(cell, self.rows[row_id][name]), (row_id, name)

    async def find(self) -> None:
        row_ids = self.some()
        for info in await self.unit.find(row_ids):
            row = self.rows[info.row_id]
            assert info.num_tokens == len(row[TOKEN_VERSIONS])
            assert (info.finish_reason is FinishReason.SEGMENT) == (info.row_id in self.partial)
            assert SAMPLING in row


async def run(seed: int, folder: str) -> None:
    rng = random.Random(seed)
    spills = rng.random() < 0.5
    spec = StorageSpec(
        unit=0,
        archive_folder=folder if rng.random() < 0.5 else None,
        archive_tokens=rng.random() < 0.5,
        spill_folder=f"{folder}/spill" if spills else None,
        max_bytes=rng.choice([1, 500, 5000]) if spills else rng.choice([0, 100_000]),
    )
    unit = StorageExecutor(spec, rank=0, num_ranks=1, spans=Spans("storage", None))
    await unit.start()
    search = Search(unit, rng)
    try:
        await search.run()
    finally:
        await unit.close()
    await asyncio.gather(*search.tasks)


@searched(few=100, many=2000)
def test_a_unit_holds_what_a_dictionary_holds(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        monkeypatch.setattr(slabs_module, "FULL_BYTES", rng.choice([64, 256, 1024, 4096]))
        monkeypatch.setattr(slabs_module, "SPARE_BYTES", rng.choice([0, 512, 2**20]))
        monkeypatch.setattr(spill_module, "FILE_BYTES", rng.choice([256, 4096]))
        with case(seed), tempfile.TemporaryDirectory() as folder:
            asyncio.run(run(seed, folder))
