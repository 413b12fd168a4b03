"""A warning that comes with every step."""

from __future__ import annotations

import logging

import pytest

from llamarl.core.errors import RepeatedWarnings, UserCodeError
from llamarl.core.records import StageResult, StageStatus
from llamarl.scoring.stage_worker import FailureRate

log = logging.getLogger(__name__)


def test_thousands_of_the_same_warning_are_a_few_lines_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = RepeatedWarnings(log)
    for step in range(1418):
        warnings.warn("step %d trained nothing", step)
    assert caplog.messages == [
        "step 0 trained nothing",
        "step 9 trained nothing (10 times so far)",
        "step 99 trained nothing (100 times so far)",
        "step 999 trained nothing (1,000 times so far)",
    ]


def test_other_words_and_what_is_about_something_else_are_other_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = RepeatedWarnings(log)
    for _ in range(3):
        warnings.warn("100% of a step's tokens are masked")
        for replica in range(2):
            warnings.warn("generator %d lies", replica, about=replica)
    assert caplog.messages == [
        "100% of a step's tokens are masked",
        "generator 0 lies",
        "generator 1 lies",
    ]


def results(num_bad: int, num_good: int = 0) -> list[StageResult]:
    error = "Traceback:\nLookupError: bad"
    bad = [StageResult(row_id=i, status=StageStatus.RAISED, error=error) for i in range(num_bad)]
    return [*bad, *(StageResult(row_id=i) for i in range(num_good))]


def test_too_many_failures_end_the_run_with_counts_and_the_last_traceback() -> None:
    failures = FailureRate(0.1, "reward", "reward.")
    failures.add(results(0, 44))
    with pytest.raises(UserCodeError, match="at most 10% of reward calls may fail") as error:
        failures.add(results(6))
    for words in (
        "(reward.max_failure_rate)",
        "got 6 of the last 50 (6 raised, 0 hung, 0 invalid)",
    ):
        assert words in str(error.value)
    assert str(error.value).endswith("LookupError: bad")


@pytest.mark.parametrize(("num_bad", "num_good"), [(5, 45), (45, 0)])
def test_few_failures_or_few_results_do_not_end_the_run(num_bad: int, num_good: int) -> None:
    failures = FailureRate(0.1, "reward", "reward.")
    failures.add(results(0, num_good))
    failures.add(results(num_bad))


def test_the_failure_rate_forgets_what_is_long_past() -> None:
    failures = FailureRate(0.1, "reward", "reward.")
    for num_bad, num_good in ((49, 0), (0, 1000), (99, 0), (1, 0)):
        failures.add(results(num_bad, num_good))
    with pytest.raises(UserCodeError, match="got 101 of the last 1000"):
        failures.add(results(1))


def test_two_causes_by_turns_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureRate(1.0, "reward", "reward.")
    for row in range(9):
        cause = ("KeyError: 'answer'", f"ValueError: {row} apples, not 'x{row}'")[row % 2]
        error = f"Traceback:\n{cause}"
        failures.add([StageResult(row_id=row, status=StageStatus.RAISED, error=error)])
    assert [text.splitlines()[-1] for text in caplog.messages] == [
        "KeyError: 'answer'",
        "ValueError: 1 apples, not 'x1'",
    ]
