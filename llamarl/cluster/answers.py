"""Calls of some actors whose answers all come through one port, which stays open.

Owns: which answer belongs to which call. Does not own: what a failure means (`actors.py`).
Invariant: every future that `send` returns ends, with an answer or with the failure of the actors.

Of each call that Monarch 0.7 itself answers it keeps 1.4 kB in the caller and 0.5 kB in the actor
until their processes end (`tools/soak_messages.py`): of the calls of days, gigabytes. Of a message
whose port is an argument it keeps nothing.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from monarch.actor import Channel

from llamarl.errors import mark_seen


class Answers:
    """Sends calls to one endpoint of `num_actors` actors, which takes a port, a number and the
    arguments, and sends (number, answer).

    `ends` are calls of the same actors that never answer: they fail when a process ends, and with
    them all calls, for nothing tells a port that stays open. For one event loop.
    """

    def __init__(self, endpoint: Any, num_actors: int, ends: Iterable[asyncio.Future[Any]]) -> None:
        self._endpoint, self._num_actors = endpoint, num_actors
        self._waiting: dict[int, deque[asyncio.Future[Any]]] = {}  # by the number of the call
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._port, self._receiver = Channel[Any].open()
        self._reading = asyncio.create_task(self._read())
        for end in ends:
            end.add_done_callback(self._end)

    def send(self, *args: Any) -> list[asyncio.Future[Any]]:
        """One future per actor, in the order the answers arrive."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(self._num_actors)]
        for future in futures:
            future.add_done_callback(mark_seen)
        number = next(self._numbers)
        self._waiting[number] = deque(futures)
        if self._failure is not None:
            self._fail(self._failure)
        else:
            self._endpoint.broadcast(self._port, number, *args)
        return futures

    async def _read(self) -> None:
        while True:
            number, answer = await self._receiver.recv().as_asyncio()
            futures = self._waiting.get(number)
            if futures is None:
                continue  # it has failed
            future = futures.popleft()
            if not futures:
                del self._waiting[number]
            if not future.done():  # nobody waits any more
                future.set_result(answer)

    def _end(self, end: asyncio.Future[Any]) -> None:
        if not end.cancelled():
            self._failure = end.exception() or RuntimeError("it left its endless call")
            self._fail(self._failure)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in itertools.chain.from_iterable(waiting.values()):
            if not future.done():
                future.set_exception(error)
