"""Ctrl-C and SIGTERM, as a job answers them while its processes run.

Owns: which signal ends a job, and when. Does not own: what is saved then (`saver.py`) or the exit
code (`main.py`). Invariant: a job is cancelled once at most, so that nothing disturbs its save and
its tear-down; only a second Ctrl-C does, and ends the process at once.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

from llamarl.metrics.console import end_display

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 - what happened
    """A signal ended the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Cancels the current task on SIGINT or SIGTERM; a context manager for the main thread."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._received: signal.Signals | None = None
        self._is_ending = False
        self._grace_s = 0.0
        self._end_after_step: Callable[[Callable[[], None]], None] | None = None
        self.ended_by: signal.Signals | None = None

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def grant(self, end_after_step: Callable[[Callable[[], None]], None], grace_s: float) -> None:
        """Let SIGTERM end the job after the step under way, `grace_s` later at the latest.

        `end_after_step` is called with the function that ends the job.
        """
        self._end_after_step, self._grace_s = end_after_step, grace_s

    def hold(self) -> None:
        """The job's end has begun: no signal cancels it any more."""
        self._is_ending = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == self._received == signal.SIGINT:
            end_display()
            os._exit(128 + number)  # the executors see that this process is gone
        if self._received is None or number == signal.SIGINT:
            self._received = signal.Signals(number)
            self._loop.call_soon_threadsafe(self._answer, self._received)

    def _answer(self, number: signal.Signals) -> None:
        if self._is_ending:
            return
        if number is signal.SIGINT:
            log.warning("interrupted; Ctrl-C again ends at once and saves nothing")
        elif self._end_after_step is not None:
            log.warning("terminated; the step under way may take %g s to end", self._grace_s)
            self._end_after_step(lambda: self._end(number))
            self._loop.call_later(self._grace_s, self._end, number)
            return
        self._end(number)

    def _end(self, number: signal.Signals) -> None:
        if not self._is_ending:
            self.ended_by, self._is_ending = number, True
            self._task.cancel()
