"""Exclusive taking of rows by processes outside a run: an External stage, and StageLoaders.

Owns: a stage for each number of units and batch size, its rows and its loaders. Does not own: who
writes rows (`own.py`). Invariant: a stage's loaders wait for rows all the time, as in a run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.cluster import Cluster
from llamarl.dataflow.graph import External, Stage
from llamarl.executors.external import ExternalExecutor
from llamarl.executors.specs import ExternalSpec
from llamarl.storage.loader import SOCKETS, StageLoader
from llamarl.storage.store import Store
from llamarl.types import StageItem, StageResult
from store_bench.rows import DTYPES, Flat, Taken, Work, calm_gc, taken_of
from store_bench.taking import ReadyRows

TIMEOUT_S = 60.0
OUTSIDE_LIMIT = 1024  # rows of a call, as in a run


class Stages:
    """Runs the stages; in a process of its own, as each stage of a run is."""

    def __init__(self, spec: None, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._place = {"rank": rank, "num_ranks": num_ranks, "spans": spans}
        self._stages: dict[str, ExternalExecutor] = {}

    async def add(self, spec: ExternalSpec) -> None:
        """Start a stage."""
        stage = self._stages[spec.stage.name] = ExternalExecutor(spec, **self._place)
        await stage.start()
        calm_gc()

    async def process(self, name: str, items: list[StageItem]) -> list[StageResult]:
        """See ExternalExecutor."""
        return await self._stages[name].process(items)


@dataclass
class _Tally:
    """What a consumer's loader of one stage got in this run."""

    is_checked: bool
    start_s: float = field(default_factory=time.perf_counter)
    end_s: float = 0.0
    take_s: float = 0.0
    get_s: float = 0.0
    found: list[Flat] = field(default_factory=list)


class LoaderConsumer:
    """A process outside the run: a thread per stage iterates over its loader."""

    def __init__(self, spec: str, *, rank: int, num_ranks: int, spans: Any) -> None:
        self._run_dir = spec
        self._tallies: dict[str, _Tally] = {}

    async def begin(self, stage: str, work: Work, is_checked: bool) -> None:
        """Count from zero, and load from this stage."""
        is_new = stage not in self._tallies
        self._tallies[stage] = _Tally(is_checked)
        if is_new:
            calm_gc()
            arguments = stage, work.batch_rows
            threading.Thread(target=self._load, args=arguments, daemon=True).start()

    async def collect(self, stage: str) -> Taken:
        """What was got since `begin`."""
        tally = self._tallies[stage]
        return taken_of((0.0, tally.end_s), tally.take_s, tally.get_s, tally.found)

    def _load(self, stage: str, batch_rows: int) -> None:
        with StageLoader(self._run_dir, stage, batch_size=batch_rows, prefetch=1) as loader:
            start_s = time.perf_counter()
            for batch in loader:
                got_s = time.perf_counter()
                flat = {name: np.hstack(batch[name]) for name in DTYPES}
                tally = self._tallies[stage]
                tally.end_s = time.monotonic()
                joined_s = time.perf_counter()
                if tally.is_checked:
                    tally.found.append(flat)
                tally.take_s += got_s - max(start_s, tally.start_s)
                tally.get_s += joined_s - got_s
                start_s = joined_s
                batch.finish()


class _Calls:
    """protocols.Processor of one stage; says when all rows of a run are finished."""

    def __init__(self, stages: Any, name: str) -> None:
        self._stages, self._name = stages, name
        self.num_left = 0
        self.done = asyncio.Event()

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        results: list[StageResult] = await self._stages.process(self._name, items)
        self.num_left -= len(results)
        if not self.num_left:
            self.done.set()
        return results

    async def serve(self, ready: ReadyRows) -> None:
        """Pass on what is ready, each handful in a call of its own, until cancelled."""
        async with asyncio.TaskGroup() as calls:
            while True:
                rows = await ready.take(OUTSIDE_LIMIT)
                calls.create_task(self.process([((row_id,), None) for row_id in rows]))


class Loading:
    """The controller's side, and the processes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._open: dict[str, tuple[ReadyRows, _Calls]] = {}
        self._serving: list[asyncio.Task[None]] = []

    async def start(self, num_consumers: int) -> None:
        """Start all processes."""
        self._stages, *self._consumers = await asyncio.gather(
            self._cluster.spawn("stages", "store_bench.loading:Stages", None),
            *(
                self._cluster.spawn(
                    f"loader-{number}", "store_bench.loading:LoaderConsumer", str(self._folder)
                )
                for number in range(num_consumers)
            ),
        )

    async def begin(
        self, work: Work, units: list[tuple[str, str]], store: Store, is_checked: bool
    ) -> ReadyRows:
        """Have consumers wait for the rows of `work`; where to mark them."""
        name = _name(work, len(units))
        if name not in self._open:
            stage = Stage(name, External(), reads=list(DTYPES), timeout_s=TIMEOUT_S)
            socket = str(self._folder / SOCKETS / name)
            spec = ExternalSpec(
                stage=stage, socket=socket, units=tuple(units), tokenizer="", storage=store
            )
            await self._stages.call_one.add(spec)
            ready, calls = ReadyRows(), _Calls(self._stages.call_one, name)
            self._open[name] = ready, calls
            self._serving.append(asyncio.create_task(calls.serve(ready)))
        ready, calls = self._open[name]
        calls.num_left = work.rows
        calls.done.clear()
        consumers = [each.call_one for each in self._consumers[: work.consumers]]
        await asyncio.gather(*(each.begin(name, work, is_checked) for each in consumers))
        return ready

    async def take(self, work: Work, num_units: int) -> list[Taken]:
        """Wait until all rows are finished; what each consumer got."""
        name = _name(work, num_units)
        _, calls = self._open[name]
        await calls.done.wait()
        consumers = [each.call_one for each in self._consumers[: work.consumers]]
        return list(await asyncio.gather(*(each.collect(name) for each in consumers)))

    async def stop(self) -> None:
        """Serve no more."""
        for task in self._serving:
            task.cancel()


def _name(work: Work, num_units: int) -> str:
    """Loaders of other consumers would take rows too, so their number is in it."""
    return f"take_{num_units}_{work.consumers}_{work.batch_rows}"
