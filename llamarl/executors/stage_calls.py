"""How the calls of a stage go: when it works and when it waits, and how often they fail.

Owns: the spans of both, the share of failures among the last calls, and their log. Does not own:
spans within a call, the calls, or what a failure means for its rollout. Invariant: busy spans and
waits follow one another without a gap or overlap, and a stage that is never idle has busy spans all
the same, one per call.
"""

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llamarl.errors import UserCodeError
from llamarl.metrics.span import Spans
from llamarl.repeated_warnings import RepeatedWarnings
from llamarl.types import StageResult, StageStatus, TurnResult

log = logging.getLogger(__name__)

WINDOW = 1000  # results over which the failure rate is taken
MINIMUM = 50  # results before it is judged
VARYING = re.compile(r"""\d+|'[^']*'|"[^"]*\"""")  # what may differ from row to row


class WorkSpans:
    """Records busy spans `name`, with the number of rows, and the waits for rollouts between.

    A busy span ends with a call and begins where the one before ended.
    """

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name
        self._num_calls = 0  # running now
        self._recorded_ns = time.monotonic_ns()  # until when there are spans

    def start(self) -> None:
        """The executor can work from now on."""
        self._recorded_ns = time.monotonic_ns()

    @contextmanager
    def working(self, num_rows: int) -> Iterator[None]:
        """The block works on so many rollouts."""
        if self._num_calls == 0:
            self._record("rollouts", "wait")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._record(self._name, "busy", rows=num_rows)

    def _record(self, name: str, cat: str, **args: int) -> None:
        now_ns = time.monotonic_ns()
        self._spans.record(name, self._recorded_ns, now_ns, cat, **args)
        self._recorded_ns = now_ns


class FailureRate:
    """Ends the run when more than `limit` of the last results failed. `label` is whose calls they
    are, such as "stage judge", and `keys` what precedes the name of a limit, such as "reward.".

    Causes that differ in numbers and quoted words only are the same warning.
    """

    def __init__(self, limit: float, label: str, keys: str) -> None:
        self._limit, self._label, self._keys = limit, label, keys
        self._statuses: deque[StageStatus] = deque(maxlen=WINDOW)
        self._warnings = RepeatedWarnings(log)

    def add(self, results: Sequence[StageResult | TurnResult]) -> None:
        """Count these. UserCodeError if more than `limit` of the last 1000 failed (judged after
        50)."""
        self._statuses.extend(result.status for result in results)
        failures = [result for result in results if result.status is not StageStatus.OK]
        for failure in failures:
            where, cause = f"{self._label} of row {failure.row_id}", failure.error.splitlines()[-1]
            about = failure.status, VARYING.sub("", cause)
            self._warnings.warn("%s: %s: %s", where, failure.status, failure.error, about=about)
        if not failures or len(self._statuses) < MINIMUM:
            return
        counts = Counter(self._statuses)
        num_failed = len(self._statuses) - counts[StageStatus.OK]
        if num_failed / len(self._statuses) > self._limit:
            bad = [status for status in StageStatus if status is not StageStatus.OK]
            kinds = ", ".join(f"{counts[status]} {status}" for status in bad)
            raise UserCodeError(
                f"at most {self._limit:.0%} of {self._label} calls may fail "
                f"({self._keys}max_failure_rate), got {num_failed} of the last "
                f"{len(self._statuses)} ({kinds}); the last one:\n{failures[-1].error}"
            )
