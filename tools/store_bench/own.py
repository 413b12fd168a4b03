"""llamarl's own store on the benchmark's job: units, producer and consumers in one cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig
from llamarl.core.config.rank_assignment import Device
from llamarl.core.faces import Storage, Worker
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec
from store_bench import rows
from store_bench.rows import Taken, Work
from store_bench.taking import TakeClient, TakeServer


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What a producer or a consumer needs: a store for each number of units, and who gives rows."""

    stores: dict[int, Store]
    takes: str


class Producer(Worker):
    """Writes rows and says so."""

    def __init__(self, spec: RoleSpec, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._stores, self._takes = spec.stores, TakeClient(spec.takes)

    async def prepare(self, work: Work) -> int:
        """Make all rows; their digest."""
        self._work, self._columns = work, rows.make_rows(work)
        rows.calm_gc()
        return rows.digest(rows.join(self._columns))

    async def put(self, num_units: int, first_row: int) -> float:
        """When the writes began."""
        work, store = self._work, self._stores[num_units]
        starts = iter(range(0, work.rows, work.batch_rows))

        async def put_some() -> None:
            for start in starts:
                part = slice(start, start + work.batch_rows)
                columns = {name: cells[part] for name, cells in self._columns.items()}
                row_ids = [first_row + row for row in range(work.rows)[part]]
                await store.write(row_ids, columns)
                await self._takes.mark(row_ids)

        start_s, _ = await rows.at_once(put_some, work)
        return start_s

    async def clear(self, num_units: int, first_row: int) -> None:
        """Free all rows."""
        row_ids = list(range(first_row, first_row + self._work.rows))
        await self._stores[num_units].retire(row_ids, {"outcome": "trained"})


class Consumer(Worker):
    """Takes rows until none are left."""

    def __init__(self, spec: RoleSpec, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._stores, self._takes = spec.stores, TakeClient(spec.takes)
        rows.calm_gc()

    async def take(self, num_units: int, work: Work, is_checked: bool) -> Taken:
        """Take and read batches until every row was taken."""
        found: list[rows.Flat] = []
        store = self._stores[num_units]

        async def take_some() -> None:
            while row_ids := await self._takes.take(work.batch_rows):
                flat = rows.join(await store.read(row_ids, rows.NAMES))
                if is_checked:
                    found.append(flat)

        _, end_s = await rows.at_once(take_some, work)
        return rows.taken_of(end_s, found)


class OwnStore:
    """Storage units, one producer and consumers; a run uses the first units and consumers."""

    def __init__(self, folder: Path) -> None:
        self._cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(folder))
        self._folder, self._path = folder, str(folder / "takes.sock")
        self._server = TakeServer(self._path)
        self._prepared: Work | None = None
        self._digest = 0
        self._next_row = 0

    async def start(self, nums_units: list[int], num_consumers: int) -> None:
        """Start all processes."""
        await self._server.start()
        units = [
            StorageSpec(
                unit=unit,
                archive_folder=None,
                socket=f"{self._folder}/sockets/{unit}",
            )
            for unit in range(max(nums_units))
        ]
        groups: list[Any] = await asyncio.gather(
            *(
                self._cluster.spawn(
                    f"storage-{unit.unit}", unit.executor, unit, 1, [Device(host=0, gpu=None)]
                )
                for unit in units
            )
        )
        await asyncio.gather(*(group.one(Worker).start() for group in groups))
        pairs = [*zip(groups, units, strict=True)]
        clients = [Unit(group.name, group.one(Storage), str(unit.socket)) for group, unit in pairs]
        self._stores = {num_units: Store(clients[:num_units]) for num_units in nums_units}
        spec = RoleSpec(stores=self._stores, takes=self._path)
        self._producer, *self._consumers = await asyncio.gather(
            self._cluster.spawn("producer", "store_bench.own:Producer", spec),
            *(
                self._cluster.spawn(f"consumer-{number}", "store_bench.own:Consumer", spec)
                for number in range(num_consumers)
            ),
        )

    async def run(self, num_units: int, work: Work, is_checked: bool = False) -> float:
        """Move all rows once; seconds (`rows.flow_s`)."""
        producer = self._producer.one(Producer)
        if work != self._prepared:
            self._digest, self._prepared = await producer.prepare(work), work
        first_row, self._next_row = self._next_row, self._next_row + work.rows
        self._server.begin(range(first_row, self._next_row))
        putting = asyncio.create_task(producer.put(num_units, first_row))
        consumers = [each.one(Consumer) for each in self._consumers[: work.consumers]]
        taken = await asyncio.gather(
            *(consumer.take(num_units, work, is_checked) for consumer in consumers)
        )
        start_s = await putting
        if is_checked:
            rows.check(work, self._digest, taken)
        await producer.clear(num_units, first_row)
        return rows.flow_s(start_s, taken)

    async def stop(self) -> None:
        """End all processes."""
        self._server.close()
        await self._cluster.stop()
