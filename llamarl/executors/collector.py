"""A collector: asks many replicas which rollouts stopped, so that the controller need not.

Owns: one pending `collect` per replica, and what they told since the controller last asked. Does
not own: who is lost and what that means (`dispatch.py`). Invariant: what a replica tells is passed
on exactly once, in its order.
"""

from __future__ import annotations

import asyncio

from llamarl.executors.specs import CollectorSpec
from llamarl.metrics.span import Spans
from llamarl.protocols import Generator
from llamarl.types import RolloutInfo

MERGE_S = 0.1  # news of hundreds of replicas goes to the controller in one message


class CollectorExecutor:
    """Asks the replicas from its first `collect` on."""

    def __init__(self, spec: CollectorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._generators = spec.generators
        self._told: list[tuple[int, list[RolloutInfo] | Exception]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_news = asyncio.Event()

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()

    async def collect(self) -> list[tuple[int, list[RolloutInfo] | Exception]]:
        """See `protocols.Collector`."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._hear(*each)) for each in self._generators.items()
            ]
        await self._has_news.wait()
        await asyncio.sleep(MERGE_S)
        self._has_news.clear()
        told, self._told = self._told, []
        return told

    async def _hear(self, replica: int, generator: Generator) -> None:
        try:
            while True:
                self._tell(replica, await generator.collect())
        except Exception as error:  # noqa: BLE001 - the controller is told, whatever it is
            self._tell(replica, error)

    def _tell(self, replica: int, news: list[RolloutInfo] | Exception) -> None:
        if news != []:  # alive and nothing to tell
            self._told.append((replica, news))
            self._has_news.set()
