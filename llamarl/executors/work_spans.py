"""When an executor whose calls overlap worked, and when it waited for rollouts.

Owns: the spans of both. Does not own: spans within a call. Invariant: they follow one another
without a gap.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llamarl.metrics.span import Spans


class WorkSpans:
    """Records busy spans `name`, with the number of what was done as `count`, and waits between."""

    def __init__(self, spans: Spans, name: str, count: str) -> None:
        self._spans = spans
        self._name, self._count = name, count
        self._num_calls = 0  # running now
        self._num_done = 0  # since the executor was last idle
        self._changed_ns = time.monotonic_ns()  # when it last became busy or idle

    def start(self) -> None:
        """The executor can work from now on."""
        self._changed_ns = time.monotonic_ns()

    @contextmanager
    def working(self, number: int) -> Iterator[None]:
        """The block works on so many."""
        if self._num_calls == 0:
            self._record("rollouts", "wait")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._num_done += number
            if self._num_calls == 0:
                self._record(self._name, "busy", **{self._count: self._num_done})
                self._num_done = 0

    def _record(self, name: str, cat: str, **args: int) -> None:
        now_ns = time.monotonic_ns()
        self._spans.record(name, self._changed_ns, now_ns, cat, **args)
        self._changed_ns = now_ns
