"""An event loop whose clock jumps to the next timer whenever nothing is runnable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

THREAD_S = 2.0  # what a thread may still be doing when all tasks wait


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`asyncio.sleep(3600)` costs nothing; a deadlock raises instead of waiting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                events = select(THREAD_S)
                if not events:
                    raise RuntimeError("deadlock: every task waits and no timer is set")
                return events
            self._now_s += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
