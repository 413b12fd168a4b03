"""Single requests gathered into calls, so that thousands of coroutines send few messages.

Owns: what waits to be sent, when a call begins, and who waits for which call. Does not own: what a
call does, or what it finds. Invariant: an item is in one call at most; its future is done once that
call has ended, unless it failed: `on_error` gets the error, and ends all that waits.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamarl.errors import cancel_all

Item = TypeVar("Item")


@dataclass(eq=False)
class Batcher(Generic[Item]):
    """Sends what is asked for by `call`: what comes in one turn of the event loop, or within
    `pause_s` after the call before, goes together, up to about `limit` as `size` counts.

    Calls overlap, so that a slow one holds up no other; with `in_turn` one follows the other, as a
    model computes them, and what comes meanwhile makes up the next one.
    """

    call: Callable[[list[Item]], Awaitable[object]]
    on_error: Callable[[Exception], None]
    limit: float = math.inf
    size: Callable[[Item], int] = lambda item: 1
    pause_s: float = 0.0
    in_turn: bool = False
    _queue: deque[tuple[Item, asyncio.Future[None]]] = field(default_factory=deque)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _sending: asyncio.Task[None] | None = None
    _next_s: float = 0.0  # no call begins before

    def ask(self, item: Item, future: asyncio.Future[None] | None = None) -> asyncio.Future[None]:
        """Send `item` with the next call; the future, given or new, is done when that has ended.
        Cancelled before, the item is not sent."""
        future = future or asyncio.get_running_loop().create_future()
        self._queue.append((item, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return future

    async def close(self) -> None:
        """Send nothing more, and give up the calls under way."""
        sending = [] if self._sending is None else [self._sending]
        await cancel_all([*self._tasks, *sending])

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            batch = self._take()
            if not self._queue:
                self._next_s = loop.time() + self.pause_s
            if not batch:
                continue
            task = asyncio.create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if self.in_turn:
                await asyncio.wait({task})
        self._sending = None

    def _take(self) -> list[tuple[Item, asyncio.Future[None]]]:
        batch, total = [], 0
        while self._queue and total < self.limit:
            item, future = self._queue.popleft()
            if not future.done():
                batch.append((item, future))
                total += self.size(item)
        return batch

    async def _run(self, batch: list[tuple[Item, asyncio.Future[None]]]) -> None:
        try:
            await self.call([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - raised where all that waits is ended
            return self.on_error(error)
        for _, future in batch:
            if not future.done():
                future.set_result(None)
