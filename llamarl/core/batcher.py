"""Gathers single requests into calls, and lets answers that come close together go on together, so
that thousands of coroutines send few messages."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamarl.core.errors import cancel_all

Item = TypeVar("Item")


@dataclass(eq=False)
class Batcher(Generic[Item]):
    """Sends requested items by `call`: items that come in one turn of the event loop, or within
    `pause_s` after the call before, go together, up to about `limit` as `size` counts.

    Calls overlap, so that a slow one holds up no other. With `in_turn` one follows the other, as a
    model computes them, and the items that come meanwhile make up the next one.
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
        """Send `item` with the next call; return the future, given or new, which is done when that
        call has ended. If it is cancelled before, the item is not sent."""
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


T = TypeVar("T")


class Gathering:
    """Lets callers of one event loop go on together: once as many wait as are still to come, when
    none has come for `quiet_s`, or `limit_s` after the first of them."""

    def __init__(self, quiet_s: float = 0.02, limit_s: float = 0.1) -> None:
        self._quiet_s, self._limit_s = quiet_s, limit_s
        self._num_asked = 0  # still to come
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._first_s = self._last_s = 0.0  # when the first and the last of these came
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False

    async def join(self, asked: Awaitable[T]) -> T:
        """Return the result of `asked`, once others have come too; its exceptions are raised at
        once."""
        self._num_asked += 1
        try:
            answer = await asked
        except BaseException:
            self._num_asked -= 1
            self._look()
            raise
        self._num_asked -= 1
        await self._wait()
        return answer

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = loop.time()
        if not self._waiting:
            self._first_s = self._last_s
        waiting = loop.create_future()
        self._waiting[waiting] = None
        self._look()
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def _look(self) -> None:
        """Let the waiting callers go on if it is time, else look again when it will be."""
        if not self._waiting or self._is_due:
            return
        loop = asyncio.get_running_loop()
        due_s = min(self._last_s + self._quiet_s, self._first_s + self._limit_s)
        if len(self._waiting) >= self._num_asked or loop.time() >= due_s:
            self._is_due = True
            loop.call_soon(self._go_on)  # with all that come in this turn of the loop
        elif self._timer is None:
            self._timer = loop.call_at(due_s, self._look_again)

    def _go_on(self) -> None:
        self._is_due = False
        waiting, self._waiting = self._waiting, {}
        for each in (each for each in waiting if not each.done()):  # others were given up
            each.set_result(None)

    def _look_again(self) -> None:
        self._timer = None
        self._look()
