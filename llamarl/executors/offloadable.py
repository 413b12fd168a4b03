"""The part of an executor that leaves a shared device and comes back."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from llamarl.executors.weight_source import SourcePart
from llamarl.executors.weight_target import TargetPart
from llamarl.metrics.span import Spans


class TaggedMemory(Protocol):
    """What an executor keeps on the device, by tag; a tag that is off the device already, or on
    it, moves 0 bytes."""

    tags: tuple[str, ...]

    def offload(self, tag: str) -> int:
        """Move it off the device; returns the bytes."""

    def prefetch(self, tag: str) -> None:
        """Start bringing it nearer; returns at once."""

    def onload(self, tag: str) -> int:
        """Move it back; returns the bytes."""


class OffloadPart:
    """protocols.Offloadable for one rank.

    `run(call, key)` runs a move on the compute thread when its turn comes. While the weights are
    away `source` has nothing to read; a publish that `target` takes part in ends before they leave.
    """

    def __init__(
        self,
        memory: TaggedMemory,
        run: Callable[[Callable[[], None], Any], Awaitable[None]],
        spans: Spans,
        source: SourcePart,
        target: TargetPart | None = None,
    ) -> None:
        self._memory, self._run, self._spans = memory, run, spans
        self._source, self._target = source, target

    async def offload(self, tags: list[str]) -> None:
        """Move these off the device; a generator stops decoding."""
        for tag in self._known(tags):
            if tag == "weights" and self._target is not None:
                await self._target.suspend()
            await self._run(partial(self._offload, tag), ("offload", tag))

    async def prefetch(self, tags: list[str]) -> None:
        """Start bringing these nearer; returns at once."""
        for tag in self._known(tags):
            self._memory.prefetch(tag)

    async def onload(self, tags: list[str]) -> None:
        """Bring these back; a generator with all of them goes on decoding."""
        for tag in self._known(tags):
            await self._run(partial(self._onload, tag), ("onload", tag))
            if tag == "weights" and self._target is not None:
                self._target.resume()

    def _known(self, tags: list[str]) -> list[str]:
        """`tags`; ValueError if one is unknown."""
        for tag in tags:
            if tag not in self._memory.tags:
                known = ", ".join(self._memory.tags)
                raise ValueError(f"tags must be among {known}, got {tag!r}")
        return tags

    def _offload(self, tag: str) -> None:
        if tag == "weights":
            self._source.withdraw()
        self._move("offload", tag, self._memory.offload)

    def _onload(self, tag: str) -> None:
        self._move("onload", tag, self._memory.onload)
        if tag == "weights":
            self._source.restore()

    def _move(self, name: str, tag: str, move: Callable[[str], int]) -> None:
        start_ns = time.monotonic_ns()
        if num_bytes := move(tag):
            end_ns = time.monotonic_ns()
            self._spans.record(name, start_ns, end_ns, "mark", tag=tag, bytes=num_bytes)
