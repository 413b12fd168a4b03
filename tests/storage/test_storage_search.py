"""Storage against a dictionary: random writes, reads and retirements, whichever way leads to its
units, with tiny slabs, packets and messages."""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cluster import sockets as channel_module
from llamarl.core.errors import ExecutorLost, NotStored
from llamarl.core.records import (
    REF_LOGPROBS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
)
from llamarl.storage import client as unit_module
from llamarl.storage import table as slabs_module
from llamarl.storage import table as spill_module
from llamarl.storage import wire as wire_module
from llamarl.storage import worker as storage_module
from llamarl.storage.client import Store
from tests.random_search import case, searched
from tests.storage.stored_rows import WAYS, assert_same, opened, rows

NUM_OPERATIONS = 45
NUM_TURNS = 8  # of the event loop: enough for a call to reach a unit
LIMITS = [
    (slabs_module, "FULL_BYTES", [64, 256, 1024, 4096]),
    (slabs_module, "SPARE_BYTES", [0, 512, 2**20]),
    (spill_module, "FILE_BYTES", [256, 4096]),
    (channel_module, "MAX_PACKET_BYTES", [1024, 65536]),  # larger writes and answers are files
    (channel_module, "MAX_HEADER_BYTES", [300, 512]),
    (wire_module, "MAPPED_BYTES", [16, 500, 32768]),
    (wire_module, "MAX_FILES", [2, 64]),
    (wire_module, "FOUND_BYTES", [600, 2**20]),
    (unit_module, "MESSAGE_BYTES", [600, 2**20]),
    (storage_module, "MESSAGE_BYTES", [600, 2**20]),
]
LATER = {REF_LOGPROBS: np.float32, REWARD: np.float64, TRAINER_LOGPROBS: np.float32}
Row = dict[str, np.ndarray]


class Search:
    """What storage should hold: rows and those that are partial. The writer `number` is at work,
    all before it are fenced."""

    def __init__(self, store: Store, rng: random.Random, is_far: bool) -> None:
        self.store, self.rng, self.is_far = store, rng, is_far
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
            return  # storage is closed amid what goes on
        for task in self.tasks:
            await task
        await self.compare([*self.rows])
        await self.store.retire([*self.rows], {"outcome": "trained"})
        usage = await self.store.usage()
        assert usage == {"num_rows": 0, "memory_bytes": usage["memory_bytes"], "spilled_bytes": 0,
                         "is_full": 0}  # fmt: skip

    def some(self, wanted: set[int] | None = None) -> list[int]:
        """A few of these rows, by default of all."""
        known = sorted(self.rows if wanted is None else wanted)
        return self.rng.sample(known, min(len(known), self.rng.randint(1, 5)))

    async def ask(self, call: Any) -> None:
        """Begin a call: it takes effect at once, and may go on while others begin."""
        task = asyncio.create_task(call)
        self.tasks.append(task)
        if self.is_far:  # what is written goes in pieces, one after the other
            await task
        for _ in range(NUM_TURNS):
            if not task.done():
                await asyncio.sleep(0)

    async def put(self, row_ids: list[int], is_fenced: bool = False) -> None:
        """Write the columns of a generator."""
        if not row_ids:
            return
        finish = self.rng.choice([FinishReason.SEGMENT, FinishReason.STOP])
        columns = rows(row_ids, self.rng.randint(0, 40), finish)
        number = self.rng.randrange(self.number) if is_fenced else self.number
        await self.ask(self.store.write(row_ids, columns, f"generator-0/{number}"))
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
            await self.ask(self.store.write(row_ids, columns))
            self.keep(row_ids, columns)

    async def erase(self) -> None:
        name = self.rng.choice([REF_LOGPROBS, REWARD])
        row_ids = self.some()
        await self.ask(self.store.erase(row_ids, [name]))
        for row_id in row_ids:
            self.rows[row_id].pop(name, None)

    async def retire(self) -> None:
        row_ids = self.some()
        await self.ask(self.store.retire(row_ids, {"outcome": "trained"}))
        self.forget(row_ids)

    async def lose(self) -> None:
        """Some of what the writer has written is written again by the next one."""
        await self.store.fence(f"generator-0/{self.number}")
        self.number += 1
        row_ids = self.some()
        await self.ask(self.store.retire(row_ids, {"outcome": "lost"}))
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
            await self.store.read([absent], [])

    async def compare(self, row_ids: list[int]) -> None:
        groups: dict[frozenset[str], list[int]] = {}  # of rows with the same columns
        for row_id in row_ids:
            groups.setdefault(frozenset(self.rows[row_id]), []).append(row_id)
        for names, some in groups.items():
            wanted = {name: [self.rows[row_id][name] for row_id in some] for name in sorted(names)}
            assert_same(await self.store.read(some, [*wanted]), wanted)

    async def find(self) -> None:
        row_ids = self.some()
        for info in await self.store.find(row_ids):
            row = self.rows[info.row_id]
            assert info.num_tokens == len(row[TOKEN_VERSIONS])
            assert (info.finish_reason is FinishReason.SEGMENT) == (info.row_id in self.partial)
            assert SAMPLING in row


async def run(seed: int, folder: str) -> None:
    rng = random.Random(seed)
    spills, way = rng.random() < 0.5, rng.choice(WAYS)
    spec = {
        "archive_folder": folder if rng.random() < 0.5 else None,
        "spill_folder": f"{folder}/spill" if spills else None,
        "max_bytes": rng.choice([1, 500, 5000]) if spills else rng.choice([0, 100_000]),
    }
    async with opened(way, Path(folder), rng.choice([1, 1, 2]), **spec) as (_, store):
        search = Search(store, rng, way in ("far", "slow link"))
        await search.run()
    for task in search.tasks:
        with suppress(ExecutorLost):  # a client that waits at a socket sees that it was closed
            await task


@searched(few=100, many=2000)
def test_storage_holds_what_a_dictionary_holds_whichever_way_leads_to_it(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        for module, name, values in LIMITS:
            monkeypatch.setattr(module, name, rng.choice(values))
        with case(seed), tempfile.TemporaryDirectory() as folder:
            asyncio.run(run(seed, folder))
