"""The part of a generator rank that receives weights: all work before a commit runs on threads
beside decoding, the commit between two decode steps."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from llamarl.core.compute import Background
from llamarl.generator.decoding import Decoding
from llamarl.metrics.span import Spans
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import BUFFER, RankLayout, Route, StagingHandle
from llamarl.publish.replica import WeightTarget
from llamarl.publish.source import SourcePart
from llamarl.publish.target import WeightBuffer


class TargetPart(WeightTarget):
    """The target of one rank; `source` passes on the versions that are committed here.

    The engine prepares a commit beside decoding (`process_weights`). `frozen` are the sums of
    weights that no publish moves, by kind."""

    def __init__(
        self,
        buffer: WeightBuffer,
        decoding: Decoding,
        source: SourcePart,
        spans: Spans,
        loop: asyncio.AbstractEventLoop,
        *,
        frozen: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._frozen = frozen or {}
        self._buffer, self._decoding, self._source = buffer, decoding, source
        self._spans, self._loop = spans, loop
        self._processed: tuple[Tensor, Any] | None = None  # memory, what the engine made of it
        self._opening: object = None  # a new object at each `prepare`
        self._background = Background()
        self._session = 0  # grows at each `reset`
        self._has_memory, self._is_closed = asyncio.Event(), asyncio.Event()
        self._has_memory.set()
        self._is_closed.set()  # no version is open

    async def target_layout(self) -> RankLayout:
        """Return where this rank wants every parameter."""
        self._decoding.check()
        return replace(self._buffer.layout(), frozen=self._frozen)

    async def connect_source(self, route: Route) -> None:
        """Receive over `route` from now on, after waiting for its other ranks."""
        self._decoding.check()
        await self._background.run(self._buffer.connect, route)

    async def prepare(self, version: int) -> StagingHandle:
        """Open the staging memory for `version`, after waiting until the weights are on the
        device."""
        self._decoding.check()
        session = self._session
        await self._has_memory.wait()
        if session != self._session:
            raise RuntimeError(f"version {version} is of a session that has ended")
        was_closed = self._is_closed.is_set()
        self._is_closed.clear()
        self._opening, self._processed = object(), None
        try:
            return await self._background.run(self._buffer.prepare, version)
        except BaseException:
            if was_closed:
                self._is_closed.set()
            raise

    async def verify(self, version: int) -> Fingerprints:
        """Return the fingerprints of the staging memory, by parameter, once the version has
        arrived."""
        self._decoding.check()
        opening = self._opening
        with self._spans.span("verify", "publish", version=version):
            prints = await self._background.run(self._buffer.verify, version)
        staging = self._buffer.staging
        with self._spans.span("process_weights", "publish", version=version):
            weights = await self._background.run(self._decoding.engine.process_weights, staging)
        if self._opening is opening:  # else the staging memory was overwritten meanwhile
            self._processed = staging, weights
        return prints

    async def commit(self, version: int) -> int:
        """Decode with the version from the next step on. Returns the number of running rollouts."""
        return await self._decoding.run(partial(self._commit, version), ("commit", version))

    async def abort(self, version: int) -> None:
        """Drop the staging memory's content; the active weights stay."""
        self._decoding.check()
        await self._background.run(self._buffer.abort, version)
        self._opening = self._processed = None
        self._is_closed.set()

    async def reset(self, limit_s: float) -> None:
        """Forget all that an earlier session of the run has left: rollouts, versions, routes.

        Raises RuntimeError if a call of that session takes longer than `limit_s`, and the engine's
        error."""
        self._decoding.check()
        self._session += 1
        await self._background.drained(limit_s)
        await self._source.background.drained(limit_s)
        await self._decoding.run(self._reset, ("reset", self._session))
        self._opening = self._processed = None
        self._has_memory.set()
        self._is_closed.set()

    def _reset(self) -> None:
        """Reset the decoding and the source, on the compute thread."""
        self._decoding.reset()
        self._source.reset()

    async def suspend(self) -> None:
        """Wait until no version is open, and let none be opened before `resume`."""
        await self._is_closed.wait()
        self._has_memory.clear()

    def resume(self) -> None:
        """Let versions be opened again, as the weights are back on the device."""
        self._has_memory.set()

    def _commit(self, version: int) -> int:
        """Commit the version and label the source with it, on the compute thread."""
        try:
            num_running = self._decoding.commit(version, self._processed)
        finally:
            self._processed = None  # the engine holds what it needs: never three sets of weights
        self._source.label(version, {BUFFER: self._buffer.active})
        self._loop.call_soon_threadsafe(self._is_closed.set)
        return num_running
