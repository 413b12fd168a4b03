"""What a generator's compute thread hands to its event loop.

Owns: the rollouts that stopped and were not collected yet, and the error that ended the engine.
Does not own: the engine. Invariant: a rollout is taken once; the first error stays.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from llamarl.generation.protocol import RequestOutput
from llamarl.generation.scheduler import OpenGroups
from llamarl.types import Request

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
        """The rollouts that stopped, and whether all of some prefix group have, or one was cut;
        waits for that, and then `GATHER_S` for more, but at most `limit_s`. Raises the engine's
        error."""
        self.check()
        if not self._is_kept:
            return [], True
        session = self.session
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_ready.wait()
            await asyncio.sleep(GATHER_S)
        self.check()
        with self._lock:
            if session != self.session:
                return [], True
            finished, self._finished = self._finished, []
            is_ready = self._is_ready.is_set()
            self._is_ready.clear()
        return finished, is_ready
