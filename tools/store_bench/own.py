"""llamarl's own store on the benchmark's job: units, producer and consumers in one cluster."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.cluster import make_cluster
from llamarl.config import ClusterConfig
from llamarl.config.rank_assignment import Device
from llamarl.executors.specs import StorageSpec
from llamarl.storage.store import Store
from llamarl.storage.unit import Unit
from store_bench import rows
from store_bench.rows import Taken, Work
from store_bench.taking import TakeClient, TakeServer


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What a producer or a consumer needs: a store for each number of units, and who gives rows."""

    stores: dict[int, Store]
    takes: str


class Producer:
    """Writes rows and says so."""

    def __init__(self, spec: RoleSpec, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._stores, self._takes = spec.stores, TakeClient(spec.takes)

    async def prepare(self, work: Work) -> int:
        """Make all rows; their digest."""
        self._work, self._columns = work, rows.make_rows(work)
        rows.calm_gc()
        return rows.digest(rows.join(self._columns))

    async def put(self, num_units: int, first_row: int) -> tuple[tuple[float, float], float]:
        """When the writes began and ended, and how long the rows' list was waited for in them."""
        notify_s, work, store = 0.0, self._work, self._stores[num_units]
        starts = iter(range(0, work.rows, work.batch_rows))

        async def put_some() -> None:
            nonlocal notify_s
            for start in starts:
                part = slice(start, start + work.batch_rows)
                columns = {name: cells[part] for name, cells in self._columns.items()}
                row_ids = [first_row + row for row in range(work.rows)[part]]
                await store.write(row_ids, columns)
                start_s = time.perf_counter()
                await self._takes.mark(row_ids)
                notify_s += time.perf_counter() - start_s

        return await rows.at_once(put_some, work), notify_s

    async def clear(self, num_units: int, first_row: int) -> float:
        """Free all rows; seconds."""
        start_s = time.monotonic()
        row_ids = list(range(first_row, first_row + self._work.rows))
        await self._stores[num_units].retire(row_ids, {"outcome": "trained"})
        return time.monotonic() - start_s


class Consumer:
    """Takes rows until none are left."""

    def __init__(self, spec: RoleSpec, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._stores, self._takes = spec.stores, TakeClient(spec.takes)
        rows.calm_gc()

    async def take(self, num_units: int, work: Work, is_checked: bool) -> Taken:
        """Take and read batches until every row was taken."""
        take_s = get_s = 0.0
        found: list[rows.Flat] = []
        store = self._stores[num_units]

        async def take_some() -> None:
            nonlocal take_s, get_s
            while True:
                start_s = time.perf_counter()
                row_ids = await self._takes.take(work.batch_rows)
                took_s = time.perf_counter()
                take_s += took_s - start_s
                if not row_ids:
                    return
                flat = rows.join(await store.read(row_ids, rows.NAMES))
                get_s += time.perf_counter() - took_s
                if is_checked:
                    found.append(flat)

        span_s = await rows.at_once(take_some, work)
        return rows.taken_of(span_s, take_s, get_s, found)


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
        await asyncio.gather(*(group.call_one.start() for group in groups))
        pairs = [*zip(groups, units, strict=True)]
        clients = [Unit(group.name, group.call_one, str(unit.socket)) for group, unit in pairs]
        self._pids = [pid for group in groups for pid in group.pids]
        self._stores = {num_units: Store(clients[:num_units]) for num_units in nums_units}
        spec = RoleSpec(stores=self._stores, takes=self._path)
        self._producer, *self._consumers = await asyncio.gather(
            self._cluster.spawn("producer", "store_bench.own:Producer", spec),
            *(
                self._cluster.spawn(f"consumer-{number}", "store_bench.own:Consumer", spec)
                for number in range(num_consumers)
            ),
        )

    async def run(
        self, num_units: int, work: Work, is_streamed: bool, is_checked: bool = False
    ) -> dict[str, float]:
        """Move all rows once; what each part took (`rows.times`)."""
        producer = self._producer.call_one
        if work != self._prepared:
            self._digest, self._prepared = await producer.prepare(work), work
        first_row, self._next_row = self._next_row, self._next_row + work.rows
        self._server.begin(range(first_row, self._next_row))
        before_s = rows.cpu_s(self._pids)
        putting = asyncio.create_task(producer.put(num_units, first_row))
        if not is_streamed:
            await putting
        consumers = [each.call_one for each in self._consumers[: work.consumers]]
        taken = await asyncio.gather(
            *(consumer.take(num_units, work, is_checked) for consumer in consumers)
        )
        put, notify_s = await putting
        units_s = rows.cpu_s(self._pids) - before_s
        if is_checked:
            rows.check(work, self._digest, taken)
        clear_s = await producer.clear(num_units, first_row)
        return rows.times(put, notify_s, taken, units_s, clear_s)

    async def stop(self) -> None:
        """End all processes."""
        self._server.close()
        await self._cluster.stop()
