"""An event loop whose clock jumps to the next timer whenever nothing is runnable.

Owns: virtual time. Does not own: what happens in it. Invariant: time stands still while anything is
runnable, so a simulation gives the same times on any machine. Code that reads `time.monotonic`
instead of the loop's clock sees real time: a simulation must not use what it measures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_S = 2.0  # what a thread may still be doing when all tasks wait


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`asyncio.sleep(3600)` costs nothing; a deadlock raises instead of waiting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                events = select(THREAD_S)
                if not events:
                    raise RuntimeError("deadlock: every task waits and no timer is set")
                return events
            self._now_s += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
