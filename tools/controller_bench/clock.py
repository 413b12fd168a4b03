"""A virtual clock on which the controller's own work takes the time that it really takes.

What simulated executors compute costs nothing. Every other callback takes its CPU time, less what
reading the clock takes, and what was charged in it, during which nothing else happens.

Simulated executors allocate objects in this process, far more than the controller does, and Python
would look for cycles among all of them in whatever callback comes next. So the clock does it, where
that is switched off, as often as Python would. Of what that takes the controller owes the share of
the objects that its callbacks left, and pays once these alone would have made Python look.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

from llamarl.controller.sessions import GC_THRESHOLDS
from llamarl.planner.simulation.clock import VirtualClockLoop

T = TypeVar("T")
IS_MODELLED = contextvars.ContextVar("IS_MODELLED", default=False)


class CostClock(VirtualClockLoop):
    """`cpu_s` is what the controller's own callbacks took, `charged_s` what messages cost it."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = self.charged_s = self._pending_s = 0.0
        self._num_objects = self._num_seen = 0  # that the controller left, and were looked at
        self._owed_ns = 0  # for that
        self._sent: list[Callable[[], None]] = []
        self._free_ns, self._read_ns = 0, _read_ns()
        self.set_exception_handler(_fail)

    def time(self) -> float:
        return self._now_s

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        """As the loop's own, and no slower: it is in what callbacks take."""
        handle = asyncio.Handle(self._timed, (callback, args), self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._timed, callback, args, context=context)

    def model(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that stands for other processes: what it computes takes no time."""
        context = contextvars.copy_context()
        context.run(IS_MODELLED.set, True)
        return self.create_task(work, context=context)

    def charge(self, seconds: float) -> None:
        """The present callback takes so much longer."""
        self._pending_s += seconds

    def send(self, arrive: Callable[[], None]) -> None:
        """Call `arrive` once the present callback has ended: its messages are on their way then."""
        self._sent.append(arrive)

    @contextmanager
    def free(self) -> Iterator[None]:
        """What the block computes takes no time."""
        start_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self._free_ns += time.thread_time_ns() - start_ns

    def _timed(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if gc.get_count()[0] > GC_THRESHOLDS[0]:
            self._collect()
        if IS_MODELLED.get():
            callback(*args)
            return
        self._free_ns, self._pending_s = 0, 0.0
        num_before, start_ns = gc.get_count()[0], time.thread_time_ns()
        callback(*args)
        own_ns = time.thread_time_ns() - start_ns - self._free_ns - self._read_ns
        self._num_objects = max(0, self._num_objects + gc.get_count()[0] - num_before)
        if self._num_objects > GC_THRESHOLDS[0]:
            self._collect()
            own_ns += self._owed_ns
            self._num_objects = self._num_seen = self._owed_ns = 0
        own_s = max(0, own_ns) / 1e9
        self.cpu_s += own_s
        self.charged_s += self._pending_s
        self._now_s += own_s + self._pending_s
        sent, self._sent = self._sent, []
        for arrive in sent:
            arrive()

    def _collect(self) -> None:
        """Look for cycles among the young objects; among all of them that is too rare to matter."""
        num_new = max(0, self._num_objects - self._num_seen)
        own_share = min(1.0, num_new / max(1, gc.get_count()[0]))
        start_ns = time.thread_time_ns()
        gc.collect(0)
        self._owed_ns += round(own_share * (time.thread_time_ns() - start_ns))
        self._num_seen = self._num_objects


def _read_ns() -> int:
    """What a callback that does nothing would seem to take, the median of a thousand."""
    return int(median(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(1000)))


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error of the bench itself ends it: else it would go on and count too little."""
    raise SystemExit(f"{context['message']}: {context.get('exception')!r}")
