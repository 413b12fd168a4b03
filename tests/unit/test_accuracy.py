"""The interval of an accuracy, and what is shown of a rollout."""

from __future__ import annotations

import pytest

from llamarl.metrics.run_logger import question_of
from llamarl.metrics.step_metrics import interval, with_interval
from llamarl.types import Prompt


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [  # R: binom::binom.confint(x, n, methods="wilson")
        (0.0, 10, 0.0, 0.2775),
        (0.5, 10, 0.2366, 0.7634),
        (1.0, 10, 0.7225, 1.0),
        (0.9, 1000, 0.8799, 0.9171),
    ],
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert interval(share, count) == pytest.approx((low, high), abs=1e-4)
    assert with_interval(0.5, 10) == "50.0% of 10 (23.7% to 76.3%)"


def test_a_sample_begins_with_the_question_not_with_the_template() -> None:
    def prompt(question: object) -> Prompt:
        return Prompt(prompt_id=1, text="<|im_start|>", token_ids=(1,), fields={"q": question})

    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"}]
    assert question_of(prompt(chat), "q") == "1+2?"
    assert question_of(prompt("1+3?"), "q") == "1+3?"
    assert question_of(prompt("1+3?"), "question") == "<|im_start|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "1"}]}]
    assert question_of(prompt(parts), "q") == "<|im_start|>"
