"""Which version counts as the best, and when a run has waited long enough for a better one."""

from __future__ import annotations

import json

import pytest

from llamarl.core.errors import TaskError
from llamarl.core.groups import Evaluation, HeldOutResult
from llamarl.metrics.held_out import BestVersion, best_version, is_sound, summed_up


def evaluation(version: int, *correct: bool) -> Evaluation:
    results = [
        HeldOutResult(
            held_out="sums" if place % 2 else "drill",
            prompt_id=place,
            correct=(is_correct,),
            rewards=(float(is_correct),),
            answers=(None,),
            num_tokens=(3,),
            is_truncated=(False,),
            shares={"accuracy": float(is_correct), "pass_at_1": float(is_correct)},
        )
        for place, is_correct in enumerate(correct)
    ]
    return summed_up(version, results, [1], ["sums", "drill"])


def test_the_earliest_of_equal_versions_is_the_best_and_version_0_is_none() -> None:
    best = BestVersion(metric="accuracy", patience=2)
    best.add(evaluation(0, True, True))
    assert not best.is_known
    assert best.state() == {}
    for version, correct in ((1, (True, False)), (2, (False, True)), (3, (True, True))):
        best.add(evaluation(version, *correct))
    assert (best.version, best.value, best.num_since, best.why_over) == (3, 1.0, 0, "")
    for version in (4, 5):
        assert not best.why_over
        best.add(evaluation(version, True, True))
    assert best.why_over == (
        "evaluation/accuracy was not above the 1 of version 3 in 2 evaluations"
    )


def test_it_may_be_judged_by_one_set() -> None:
    best = BestVersion(metric="sums/pass_at_1")
    best.add(evaluation(1, False, True))
    best.add(evaluation(2, True, False))
    assert (best.version, best.num_since) == (1, 1)
    assert not best.why_over, "without patience it waits for ever"


def test_it_goes_on_from_its_state_unless_the_metric_is_another() -> None:
    best = BestVersion(metric="accuracy", patience=9)
    best.add(evaluation(1, True, False))
    best.add(evaluation(2, False, False))
    saved = json.loads(json.dumps(best.state()))
    assert is_sound(saved, most=2)
    assert not is_sound(saved, most=0)
    assert best_version("accuracy", 9, saved) == best
    assert best_version("accuracy", 1, saved).why_over, "less patience than before"
    assert best_version("reward", 9, saved) == BestVersion(metric="reward", patience=9)


def test_a_metric_that_evaluations_turn_out_not_to_have_is_one_line() -> None:
    best = BestVersion(metric="maj_at_1")
    with pytest.raises(TaskError, match=r"^checkpoint.best must be a metric .* got maj_at_1$"):
        best.add(evaluation(1, True, True))
