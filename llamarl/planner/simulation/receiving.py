"""The side of simulated executors that publishes and phases see.

Owns: layouts of one made-up parameter, staging handles, commits and moves, in simulated time. Does
not own: decoding (`replica.py`) or training (`executors.py`). Invariant: what a real generator does
on its compute thread waits for a moment between two decode steps here too; the rest goes on beside
decoding.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from llamarl.errors import StaleVersion
from llamarl.executors.standstill import Standstill
from llamarl.planner.simulation.cores import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import Setting, SimulatedExecutor
from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout, Route, StagingHandle

T = TypeVar("T")
Command = tuple[float, Callable[[], None], str]
"""Seconds on the compute thread, what is done at their end, and what they are called."""


class Layouts(SimulatedExecutor):
    """One rank on each of `hosts`, each with the made-up parameters, one per bucket.

    With staging=bucket decoding stands still from the first bucket's commit on; an empty one here.
    """

    def __init__(
        self, setting: Setting, costs: Costs, cores: Cores, *, hosts: tuple[str, ...]
    ) -> None:
        super().__init__(setting, costs, cores)
        self._hosts = hosts
        is_cut = self._config.weights.staging == "bucket"
        self._buckets = ("first", "rest") if is_cut else ("rest",)

    async def source_layout(self) -> list[RankLayout]:
        return self._layouts((self._buckets,))

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None for _ in self._hosts]

    def _layouts(self, buckets: tuple[tuple[str, ...], ...]) -> list[RankLayout]:
        box = Box(start=(0,), stop=(1,), buffer="all", offset=0, strides=(1,))
        layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
        parameters = dict.fromkeys(self._buckets, layout)
        return [
            RankLayout(rank=rank, host=host, parameters=parameters, buckets=buckets)
            for rank, host in enumerate(self._hosts)
        ]


class Receiving(Layouts):
    """WeightTarget, WeightSource and Offloadable; what the first methods do is the decoder's."""

    def __init__(
        self,
        setting: Setting,
        costs: Costs,
        cores: Cores,
        *,
        index: int,
        hosts: tuple[str, ...],
    ) -> None:
        super().__init__(setting, costs, cores, hosts=hosts)
        self.index, self.name, self.version = index, f"generator-{index}", -1
        self._weight = self._config.generator.num_ranks
        self._commands: deque[Command] = deque()
        self._standstill = Standstill(
            cores.time,
            lambda name, start, end: self._timeline.record(self.name, name, start, end, "wait"),
        )
        self._is_busy = False

    def _interrupt(self) -> None:
        """A command waits for the next moment between two steps."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """A command has ended."""
        raise NotImplementedError

    def _committed(self, version: int) -> int:
        """`version` is live; returns the number of running rollouts."""
        raise NotImplementedError

    def _forget(self, tag: str) -> None:
        """Memory of this kind leaves the device."""
        raise NotImplementedError

    # WeightTarget

    async def target_layout(self) -> list[RankLayout]:
        return self._layouts(tuple((bucket,) for bucket in self._buckets))

    async def connect_source(self, route: Route) -> list[None]:
        return [None for _ in self._hosts]

    async def prepare(self, version: int, bucket: int) -> list[StagingHandle]:
        await self._travel()
        assert version > self.version, (version, self.version)
        self._timeline.offered_s.setdefault(version, asyncio.get_running_loop().time())
        return [
            StagingHandle(
                version=version,
                bucket=bucket,
                replica=self.index,
                rank=rank,
                host=host,
                address=None,
                num_bytes=4,
            )
            for rank, host in enumerate(self._hosts)
        ]

    async def verify(self, version: int, bucket: int) -> list[dict[str, int]]:
        await self._travel()
        if self._buckets[bucket] == "rest":
            await self._cores.work(self._costs.check_s, self._weight)
        return [{self._buckets[bucket]: version} for _ in self._hosts]

    async def commit(self, version: int, bucket: int) -> list[int]:
        await self._travel()
        is_last = bucket + 1 == len(self._buckets)

        def commit() -> int:
            self._standstill.is_mixed = not is_last
            if is_last:
                self.version = version
                return self._committed(version)
            return 0

        return [
            await self._between_steps(self._costs.commit_s if is_last else 0.0, commit, "commit")
        ]

    async def abort(self, version: int) -> list[None]:
        return [None for _ in self._hosts]

    # WeightSource

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        bucket = self._buckets[handles[0].bucket]
        if bucket == "rest":
            await self._cores.work(self._costs.relay_s)
        return [{bucket: version * len(handles)}]

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self._standstill.away:
                self._forget(tag)
                await self._move("offload", tag, partial(self._standstill.away.add, tag))

    async def prefetch(self, tags: list[str]) -> None: ...

    async def onload(self, tags: list[str]) -> None:
        for tag in tags:
            if tag in self._standstill.away:
                await self._move("onload", tag, partial(self._standstill.away.discard, tag))

    async def _move(self, name: str, tag: str, then: Callable[[], None]) -> None:
        await self._travel()
        seconds = self._costs.moves_s.get(f"generator {tag}", 0.0)
        await self._between_steps(seconds, then, name)

    async def _between_steps(self, seconds: float, call: Callable[[], T], name: str) -> T:
        """Run `call` at the end of `seconds` on the compute thread."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not done.done():
                done.set_result(call())
            self._go_on()

        self._commands.append((seconds, end, name))
        self._interrupt()
        return await done
