"""How often user code fails, and when that ends the run.

Owns: the share of failures among the last calls, and their log. Does not own: the calls, or what a
failure means for its rollout. Invariant: a cause that comes over and over is logged once.
"""

import logging
from collections import Counter, deque
from collections.abc import Sequence

from llamarl.errors import UserCodeError
from llamarl.types import StageResult, StageStatus

logger = logging.getLogger(__name__)

WINDOW = 1000  # results over which the failure rate is taken
MINIMUM = 50  # results before it is judged


class FailureRate:
    """Ends the run when more than `limit` of the last results failed. `label` is whose calls they
    are, such as "stage judge", and `key` what the user sets the limit by."""

    def __init__(self, limit: float, label: str, key: str) -> None:
        self._limit, self._label, self._key = limit, label, key
        self._statuses: deque[StageStatus] = deque(maxlen=WINDOW)
        self._logged_cause = ""

    def add(self, results: Sequence[StageResult]) -> None:
        """Count these. UserCodeError if more than `limit` of the last 1000 failed (judged after
        50)."""
        self._statuses.extend(result.status for result in results)
        failures = [result for result in results if result.status is not StageStatus.OK]
        for failure in failures:
            cause = failure.error.splitlines()[-1]
            if cause != self._logged_cause:  # the same one over and over says nothing new
                where = f"{self._label} of row {failure.row_id}"
                logger.warning("%s: %s: %s", where, failure.status, failure.error)
                self._logged_cause = cause
        counts = Counter(self._statuses)
        num_failed = len(self._statuses) - counts[StageStatus.OK]
        is_judged = failures and len(self._statuses) >= MINIMUM
        if is_judged and num_failed / len(self._statuses) > self._limit:
            bad = [status for status in StageStatus if status is not StageStatus.OK]
            kinds = ", ".join(f"{counts[status]} {status}" for status in bad)
            raise UserCodeError(
                f"at most {self._limit:.0%} of {self._label} calls may fail ({self._key}), got "
                f"{num_failed} of the last {len(self._statuses)} ({kinds}); the last one:\n"
                f"{failures[-1].error}"
            )
