"""When an executor whose calls overlap worked, and when it waited for rollouts.

Owns: the spans of both. Does not own: spans within a call. Invariant: they follow one another
without a gap or overlap, and one that is never idle has busy spans all the same, one per call.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llamarl.metrics.span import Spans


class WorkSpans:
    """Records busy spans `name`, with the number of what was done as `count`, and waits between.

    A busy span ends with a call and begins where the one before ended.
    """

    def __init__(self, spans: Spans, name: str, count: str) -> None:
        self._spans = spans
        self._name, self._count = name, count
        self._num_calls = 0  # running now
        self._recorded_ns = time.monotonic_ns()  # until when there are spans

    def start(self) -> None:
        """The executor can work from now on."""
        self._recorded_ns = time.monotonic_ns()

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
            self._record(self._name, "busy", **{self._count: number})

    def _record(self, name: str, cat: str, **args: int) -> None:
        now_ns = time.monotonic_ns()
        self._spans.record(name, self._recorded_ns, now_ns, cat, **args)
        self._recorded_ns = now_ns
