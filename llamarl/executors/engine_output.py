"""What a generator's compute thread hands to its event loop, and what that keeps of it.

Owns: the rollouts that stopped and were not collected yet, the error that ended the engine, and
the rows that were reported, until the dispatcher has got them. Does not own: the engine, or who
asks. Invariant: a rollout is taken once; the first error stays.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from llamarl.generation.protocol import RequestOutput
from llamarl.generation.scheduler import OpenGroups
from llamarl.types import FinishReason, Request

Row = TypeVar("Row")
GATHER_S = 0.05  # several decode steps: rollouts of one moment travel in one message


class EngineOutput:
    """`put` and `fail` may be called on any thread; the other methods belong to `loop`.

    All ranks of a replica write the same: without `is_kept`, on ranks other than 0, rollouts are
    dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_kept: bool) -> None:
        self._loop, self._is_kept = loop, is_kept
        self._lock = threading.Lock()
        self._finished: list[RequestOutput] = []  # guarded by _lock, as are _open and _error
        self._open = OpenGroups()
        self.session = 0  # grows at each `reset`
        self._error: BaseException | None = None
        self._is_ready = asyncio.Event()

    def check(self) -> None:
        """Raise the error that ended the engine, if one did."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def fail(self, error: BaseException) -> None:
        """The engine has ended."""
        with self._lock:
            self._error = self._error or error
        self._loop.call_soon_threadsafe(self._is_ready.set)

    def expect(self, requests: Sequence[Request]) -> None:
        """These rollouts will stop."""
        with self._lock:
            self._open.add(requests if self._is_kept else ())

    def put(self, finished: Sequence[RequestOutput]) -> None:
        """These rollouts stopped."""
        if not self._is_kept:
            return
        with self._lock:
            self._finished += finished
            is_ready = [self._open.stop(item.request, item.reason) for item in finished]
        if any(is_ready):
            self._loop.call_soon_threadsafe(self._is_ready.set)

    def reset(self) -> None:
        """Forget what stopped and what will; a `take` that waits returns nothing."""
        with self._lock:
            self._finished, self._open = [], OpenGroups()
            self.session += 1
        self._loop.call_soon_threadsafe(self._is_ready.set)

    async def take(self, limit_s: float) -> tuple[list[RequestOutput], bool]:
        """The rollouts that stopped, and whether all of some prefix group have, or one is to go on;
        waits for that, but at most `limit_s`, and then `GATHER_S` for more, unless one is to go on:
        what comes while a report is on its way goes with the next. Raises the engine's error."""
        self.check()
        if not self._is_kept:
            return [], True
        session = self.session
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_ready.wait()
            if not self._is_waited_for():
                await asyncio.sleep(GATHER_S)
        self.check()
        with self._lock:
            if session != self.session:
                return [], True
            finished, self._finished = self._finished, []
            is_ready = self._is_ready.is_set()
            self._is_ready.clear()
        return finished, is_ready

    def _is_waited_for(self) -> bool:
        """Whether some rollout that stopped is to go on."""
        with self._lock:
            return any(item.reason is FinishReason.SEGMENT for item in self._finished)


class KeptRows(Generic[Row]):
    """Rows that an executor has reported, numbered in the order in which they stopped.

    A row is kept until a question says that it arrived, so an answer that is lost on its way, with
    the collector that asked or without, costs nothing. Numbers begin with the time, so that those
    of a later process or session are higher.
    """

    def __init__(self) -> None:
        self._first = time.time_ns()
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """These stopped, after all others."""
        self._rows += rows

    def forget(self, received: int) -> None:
        """The rows below this number have arrived."""
        num_rows = max(0, received - self._first)
        del self._rows[:num_rows]
        self._first += num_rows

    def report(self) -> tuple[int, list[Row]]:
        """The number of the first, and all that is kept."""
        return self._first, [*self._rows]
