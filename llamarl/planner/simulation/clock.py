"""An event loop whose clock jumps to the next timer whenever nothing is runnable.

Owns: virtual time. Does not own: what happens in it. Invariant: time stands still while anything is
runnable or a thread works, so a simulation gives the same times on any machine. Code that reads
`time.monotonic` instead of the loop's clock sees real time: a simulation must not use what it
measures.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 2.0  # what a thread may still be doing when all tasks wait


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`asyncio.sleep(3600)` costs nothing; a deadlock raises instead of waiting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._threads: set[asyncio.Future[Any]] = set()
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if self._threads and timeout != 0:
                return select()  # the end of a thread wakes the loop
            if timeout is None:
                events = select(THREAD_S)
                if not events:
                    raise RuntimeError("deadlock: every task waits and no timer is set")
                return events
            self._now_s += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return future

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual clock.

    Cycles are collected afterwards: looking for them among all rollouts in flight takes a third of
    a simulation, and there are few.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            return runner.run(main)
    finally:
        if was_enabled:
            gc.enable()
