"""Waiting: for calls that may never answer, for a change of state, for one's turn to commit.

Owns: nothing that outlives a wait. Does not own: what an outcome means (`replica sync.py`).
Invariant: no wait for another process is without a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def attempt(call: Coroutine[Any, Any, T], timeout_s: float) -> asyncio.Task[T]:
    """Wait for the call at most so long, then give it up; its outcome is left in the task."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()  # of a finished one: asyncio need not warn if nobody asks how it ended
    return task


async def within(call: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """The answer of a call; TimeoutError if there is none in time."""
    task = await attempt(call, timeout_s)
    if not task.done():
        raise silence(what, timeout_s)
    return task.result()


def silence(what: str, timeout_s: float) -> TimeoutError:
    """The error for a call that did not answer."""
    return TimeoutError(f"{what} must end within weights.timeout_s={timeout_s:g} s, got no answer")


class Change:
    """Something that tasks of one event loop wait for changed: they look again.

    Only those wake who have what they wait for: hundreds of replica syncs wait, and one of them
    goes on.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], object]] = {}

    def tell(self) -> None:
        """Let everybody who waits look again."""
        for future, is_so in list(self._waiting.items()):
            if not future.done() and is_so():
                future.set_result(None)

    async def until(self, is_so: Callable[[], object]) -> None:
        """Return once `is_so()`."""
        while not is_so():
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = is_so
            try:
                await future
            finally:
                del self._waiting[future]


class Stagger:
    """One task after the other, but nobody waits for longer than `limit_s` for the one before."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """The others wait while the block runs, at most `limit_s`."""
        await self._lock.acquire()
        held = ExitStack()
        held.callback(self._lock.release)
        timer = asyncio.get_running_loop().call_later(self._limit_s, held.close)
        try:
            yield
        finally:
            timer.cancel()
            held.close()  # without effect where the timer did it
