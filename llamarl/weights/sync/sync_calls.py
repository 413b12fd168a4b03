"""Waiting: for calls that may never answer, for a change of state, for a replica's turn to commit.

Owns: nothing that outlives a wait. Does not own: what an outcome means (`replica_sync.py`).
Invariant: every wait for another process has a limit.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
LATE_S = 1.0  # a timer that fires so late was not held up by other work of the event loop


async def attempt(call: Coroutine[Any, Any, T], timeout_s: float) -> asyncio.Task[T]:
    """Wait for the call, then cancel it if it has not ended; its outcome is left in the task.

    If the timer fires late, this process stood still meanwhile (Ctrl-Z stops the controller alone):
    the answer, which may lie there unread, gets as much time again.
    """
    task = asyncio.ensure_future(call)
    clock = asyncio.get_running_loop().time
    try:
        left_s = timeout_s
        while True:
            end_s = clock() + left_s
            await asyncio.wait({task}, timeout=left_s)
            late_s = clock() - end_s
            if task.done() or late_s < LATE_S:
                break
            left_s = min(late_s, timeout_s)
    finally:
        task.cancel()  # from then on asyncio does not log an exception left in the task
    return task


def failure(task: asyncio.Future[Any], what: str, timeout_s: float) -> BaseException | None:
    """What an attempt raised; TimeoutError if it did not end, None if it succeeded."""
    if task.done() and not task.cancelled():
        return task.exception()
    return TimeoutError(f"{what} must end within weights.timeout_s={timeout_s:g} s, got no answer")


class Change:
    """A condition on state that tasks of one event loop share.

    `notify` wakes only the waiters whose predicate holds, and asks only those that the change may
    concern: with hundreds of replicas that all wait, a change of one concerns those that it feeds.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[object, dict[asyncio.Future[None], Callable[[], object]]] = (
            defaultdict(dict)
        )

    def notify(self, of: object = None) -> None:
        """Wake the tasks whose predicate holds now. If only `of` has changed, those that wait for
        something else are left out."""
        concerned = self._waiting if of is None else {None, of} & self._waiting.keys()
        for waiting in [self._waiting[each] for each in concerned]:
            for future, predicate in list(waiting.items()):
                if not future.done() and predicate():
                    future.set_result(None)

    async def until(self, predicate: Callable[[], object], of: object = None) -> None:
        """Return once `predicate()` is true. It becomes so by a change of `of` or by one that
        concerns all; None: by any."""
        while not predicate():
            future = asyncio.get_running_loop().create_future()
            self._waiting[of][future] = predicate
            try:
                await future
            finally:
                del self._waiting[of][future]
                if not self._waiting[of]:
                    del self._waiting[of]


class Stagger:
    """Lets one task after the other into a block, the next one after `limit_s` at the latest."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Other tasks wait while the block runs, for `limit_s` at most."""
        await self._lock.acquire()
        held = ExitStack()
        held.callback(self._lock.release)
        timer = asyncio.get_running_loop().call_later(self._limit_s, held.close)
        try:
            yield
        finally:
            timer.cancel()
            held.close()  # no effect if the timer has released the lock
