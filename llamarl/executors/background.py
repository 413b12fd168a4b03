"""What an executor does beside its compute thread: calls on threads, and to others.

Owns: which of them have not ended. Does not own: what they do. Invariant: `drained` returns only
while none runs.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Waits for work; a caller that gives up does not end it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """The result of a call on a thread; its exceptions come back."""
        return await self.wait_for(asyncio.to_thread(call, *args))

    async def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`; its exceptions come back."""
        work = asyncio.ensure_future(call)
        self._running.add(work)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    async def drained(self, limit_s: float) -> None:
        """Wait until all calls have ended; RuntimeError if that takes longer than `limit_s`."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=limit_s)
            if late:
                raise RuntimeError(f"{len(late)} calls must end within {limit_s:g} s")

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._running.discard(work)
        # Looked at here, too: asyncio logs a failure that is not, as when the caller gave up.
        if not work.cancelled():
            work.exception()
