"""Calls of some actors whose answers all come through one port, which stays open.

Owns: which answer belongs to which call. Does not own: what a failure means (`actors.py`).
Invariant: every future that `send` returns ends, with an answer or with the failure of the actors.

Of each call that Monarch 0.7 itself answers it keeps 1.4 kB in the caller and 0.5 kB in the actor
until their processes end: of the calls of days, gigabytes. Of a message
whose port is an argument it keeps nothing.
"""

import asyncio
import itertools
import pickle
from collections import deque
from collections.abc import Iterable
from typing import Any

from monarch.actor import Channel

from llamarl.cluster.call_result import describe
from llamarl.errors import RemoteError, mark_seen


class Answers:
    """Sends calls to one endpoint of `num_actors` actors, which takes a port, a number and the
    pickled arguments, and sends (number, pickled answer). What cannot be pickled or read again
    fails its own call.

    `ends` are calls of the same actors that never answer: they fail when a process ends, and with
    them all calls, for nothing tells a port that stays open. For one event loop.
    """

    def __init__(self, endpoint: Any, num_actors: int, ends: Iterable[asyncio.Future[Any]]) -> None:
        self._endpoint, self._num_actors = endpoint, num_actors
        self._waiting: dict[int, deque[asyncio.Future[Any]]] = {}  # by the number of the call
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._port, self._receiver = Channel[tuple[int, bytes]].open()
        for end in ends:
            end.add_done_callback(self._end)
        self._listen()

    def send(self, *args: Any) -> list[asyncio.Future[Any]]:
        """One future per actor, in the order the answers arrive."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(self._num_actors)]
        for future in futures:
            future.add_done_callback(mark_seen)
        data = pickle.dumps(args)
        number = next(self._numbers)
        self._waiting[number] = deque(futures)
        if self._failure is not None:
            self._fail(self._failure)
        else:
            self._endpoint.broadcast(self._port, number, data)
        return futures

    def _listen(self) -> None:
        # By a callback and not in a task: asyncio cancels all tasks at the end of its loop, and
        # some of those make calls as they end.
        self._receiver.recv().as_asyncio().add_done_callback(self._take)

    def _take(self, message: asyncio.Future[tuple[int, bytes]]) -> None:
        if message.cancelled() or message.exception() is not None:
            return self._end(message)
        self._listen()
        number, data = message.result()
        futures = self._waiting.get(number)
        if futures is None:
            return  # it has failed
        future = futures.popleft()
        if not futures:
            del self._waiting[number]
        if future.done():
            return  # nobody waits any more
        try:
            future.set_result(pickle.loads(data))
        except Exception as error:  # noqa: BLE001 - results fail in any way they like
            future.set_exception(RemoteError(f"an answer cannot be read: {describe(error)}"))

    def _end(self, end: asyncio.Future[Any]) -> None:
        if not end.cancelled():
            self._failure = end.exception() or RuntimeError("it left its endless call")
            self._fail(self._failure)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in itertools.chain.from_iterable(waiting.values()):
            if not future.done():
                future.set_exception(error)
