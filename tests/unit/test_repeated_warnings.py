"""A warning that comes with every step."""

from __future__ import annotations

import logging

import pytest

from llamarl.core.errors import RepeatedWarnings
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
