"""A publisher and its two ends as processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llamarl.core.config import WeightsConfig
from llamarl.metrics.span import Spans
from llamarl.publish.layout import RankLayout, StagingHandle
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import SplitRoute, WeightKind
from weights_bench.processes import Remote, call_all


class Trainer:
    """The source of weights, as a publisher calls it."""

    def __init__(self, ranks: list[Remote]) -> None:
        self._ranks = ranks

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        found: list[Any] = await getattr(self, method.__name__)(*args)
        return found

    async def source_layout(self) -> list[RankLayout]:
        return await call_all(self._ranks, "layout")

    async def connect_target(self, replica: int, route: SplitRoute | None) -> list[None]:
        parts = [route and route.for_rank(rank) for rank in range(len(self._ranks))]
        asked = zip(self._ranks, parts, strict=True)
        return await asyncio.gather(*(rank.call("connect", replica, part) for rank, part in asked))

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        return await call_all(self._ranks, "write", version, handles)


class Generator:
    """The target of one way: weight buffers of all ranks under one replica number."""

    def __init__(self, ranks: list[Remote], replica: int) -> None:
        self._ranks, self._replica = ranks, replica

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        found: list[Any] = await getattr(self, method.__name__)(*args)
        return found

    async def _all(self, name: str, *args: Any) -> list[Any]:
        return await call_all(self._ranks, name, self._replica, *args)

    async def target_layout(self) -> list[RankLayout]:
        return await self._all("layout")

    async def connect_source(self, route: SplitRoute) -> list[None]:
        parts = [(rank, route.for_rank(i)) for i, rank in enumerate(self._ranks)]
        return await asyncio.gather(
            *(rank.call("connect", self._replica, part) for rank, part in parts)
        )

    async def prepare(self, version: int) -> list[StagingHandle]:
        return await self._all("prepare", version)

    async def verify(self, version: int) -> list[dict[str, int]]:
        return await self._all("verify", version)

    async def commit(self, version: int) -> list[int]:
        return await self._all("commit", version)

    async def abort(self, version: int) -> list[None]:
        return await self._all("abort", version)


class Executor:
    """The Receiver that is a generator executor in its own process."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [await self._remote.call("ask", method.__name__, *args)]


def make_publisher(
    trainers: list[Remote], receiver: Any, replica: int, config: WeightsConfig, folder: str
) -> Publisher:
    """A publisher to one replica."""
    return Publisher(
        Trainer(trainers),
        {replica: receiver},
        Spans("controller", None),
        config,
        rendezvous_folder=folder,
        kind_of=lambda replica: WeightKind(device="cpu"),
    )
