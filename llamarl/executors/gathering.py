"""Answers that come close together go on together.

Owns: how long an answer waits for others, for a decode step of few rollouts wastes most of it. Does
not own: what is asked, or what goes on. Invariant: an answer waits at most `limit_s`, and not at
all if no more of what was asked are still to come than wait already.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Gathering:
    """Of one event loop. Those that wait go on once as many have come as are still to come, when
    none has come for `quiet_s`, or `limit_s` after the first of them."""

    def __init__(self, quiet_s: float = 0.02, limit_s: float = 0.1) -> None:
        self._quiet_s, self._limit_s = quiet_s, limit_s
        self._num_asked = 0  # still to come
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._first_s = self._last_s = 0.0  # when the first and the last of these came
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False

    async def join(self, asked: Awaitable[T]) -> T:
        """What is `asked`, once others have come too; its exceptions are raised at once."""
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
        """Let those that wait go on if it is time, else look again when it will be."""
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
