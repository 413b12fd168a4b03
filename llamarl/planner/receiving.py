"""The side of a modelled replica that publishes and turns see.

Owns: layouts of one made-up parameter, offers, flips and moves, in modelled time. Does not own:
decoding (`replica.py`). Invariant: what a real executor does on its compute thread waits for a
moment between two decode steps here too; the rest goes on beside decoding.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from llamarl.config import Config
from llamarl.planner.cores import Cores
from llamarl.planner.costs import Costs
from llamarl.planner.timeline import Timeline
from llamarl.weights.errors import StaleVersion
from llamarl.weights.layout import Box, Offer, ParameterLayout, RankLayout, Route

T = TypeVar("T")
Command = tuple[float, Callable[[], None], str]
"""Seconds on the compute thread, what is done at their end, and what they are called."""


class Receiving:
    """protocols.Receiver, Sender and Tenant; what the first methods do is the decoder's."""

    def __init__(
        self,
        index: int,
        config: Config,
        costs: Costs,
        *,
        hosts: tuple[str, ...],
        cores: Cores,
        timeline: Timeline,
    ) -> None:
        self.index, self.name, self.version = index, f"generator-{index}", -1
        self._costs, self._cores, self._timeline = costs, cores, timeline
        self._weight = config.generator.num_ranks
        self._hosts = hosts
        # With a bucket, decoding stands still from the first part's flip on: an empty one here.
        self._parts = ("first", "rest") if config.weights.shadow == "bucket" else ("rest",)
        self._commands: deque[Command] = deque()
        self._away: set[str] = set()
        self._is_torn = False
        self._is_busy = False

    def _interrupt(self) -> None:
        """A command waits for the next moment between two steps."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """A command has ended."""
        raise NotImplementedError

    def _flipped(self, version: int) -> int:
        """`version` is live; returns the number of running rollouts."""
        raise NotImplementedError

    def _forget(self, kind: str) -> None:
        """Memory of this kind leaves the device."""
        raise NotImplementedError

    # Receiver

    async def target_layout(self) -> list[RankLayout]:
        return layouts(self._hosts, tuple((part,) for part in self._parts))

    async def connect_source(self, route: Route) -> list[None]:
        return [None for _ in self._hosts]

    async def offer(self, version: int, part: int) -> list[Offer]:
        await travel(self._costs)
        self._timeline.offered_s.setdefault(version, asyncio.get_running_loop().time())
        return [
            Offer(
                version=version,
                part=part,
                replica=self.index,
                rank=rank,
                host=host,
                address=None,
                num_bytes=4,
            )
            for rank, host in enumerate(self._hosts)
        ]

    async def fingerprint(self, version: int, part: int) -> list[dict[str, int]]:
        await travel(self._costs)
        if self._parts[part] == "rest":
            await self._cores.work(self._costs.check_s, self._weight)
        return [{self._parts[part]: version} for _ in self._hosts]

    async def flip(self, version: int, part: int) -> list[int]:
        await travel(self._costs)
        is_last = part + 1 == len(self._parts)

        def flip() -> int:
            self._is_torn = not is_last
            if is_last:
                self.version = version
                return self._flipped(version)
            return 0

        return [await self._between_steps(self._costs.flip_s if is_last else 0.0, flip, "flip")]

    async def discard(self, version: int) -> list[None]:
        return [None for _ in self._hosts]

    # Sender

    async def source_layout(self) -> list[RankLayout]:
        return layouts(self._hosts, (self._parts,))

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        return [None for _ in self._hosts]

    async def write(self, version: int, offers: list[Offer]) -> list[dict[str, int]]:
        if version != self.version:
            raise StaleVersion(f"{version} is not {self.version}")
        part = self._parts[offers[0].part]
        if part == "rest":
            await self._cores.work(self._costs.relay_s)
        return [{part: version * len(offers)}]

    # Tenant

    async def leave(self, kinds: list[str]) -> None:
        for kind in kinds:
            if kind not in self._away:
                self._forget(kind)
                await self._move("offload", kind, partial(self._away.add, kind))

    async def prefetch(self, kinds: list[str]) -> None: ...

    async def enter(self, kinds: list[str]) -> None:
        for kind in kinds:
            if kind in self._away:
                await self._move("reload", kind, partial(self._away.discard, kind))

    async def _move(self, name: str, kind: str, then: Callable[[], None]) -> None:
        await travel(self._costs)
        seconds = self._costs.moves_s.get(f"generator {kind}", 0.0)
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


async def travel(costs: Costs) -> None:
    """A call is on its way to another process."""
    if costs.message_s:
        await asyncio.sleep(costs.message_s)


def layouts(hosts: Sequence[str], parts: tuple[tuple[str, ...], ...]) -> list[RankLayout]:
    """One rank per host, each with all of the made-up parameters, which `parts` name."""
    box = Box(start=(0,), stop=(1,), buffer="all", offset=0, strides=(1,))
    layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
    parameters = {name: layout for part in parts for name in part}
    return [
        RankLayout(rank=rank, host=host, parameters=parameters, parts=parts)
        for rank, host in enumerate(hosts)
    ]
