"""What samples say of a model: pass@k and maj@k against all choices of k, intervals against how
often they hold."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.metrics.estimates import (
    effective_count,
    interval,
    majority_at,
    pass_at,
    share_of,
    with_margin,
)

SAMPLES = st.lists(
    st.tuples(st.none() | st.integers(0, 3), st.booleans()), min_size=1, max_size=7
).flatmap(lambda samples: st.tuples(st.just(samples), st.integers(1, len(samples))))
Samples = tuple[list[tuple[int | None, bool]], int]


@given(SAMPLES)
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(
    given_: Samples,
) -> None:
    samples, k = given_
    choices = [*combinations([is_correct for _, is_correct in samples], k)]
    expected = sum(map(any, choices)) / len(choices)
    num_correct = sum(is_correct for _, is_correct in samples)
    assert pass_at(k, len(samples), num_correct) == pytest.approx(expected)


def vote(samples: list[tuple[int | None, bool]], chosen: tuple[int, ...]) -> float:
    """Whether the most frequent answer of the chosen ones is right: of several, on average."""
    counts = Counter(samples[i][0] for i in chosen if samples[i][0] is not None)
    most = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == most]
    right = [
        np.mean([is_correct for answer, is_correct in samples if answer == winner])
        for winner in winners
    ]
    return float(np.mean(right)) if right else 0.0


@given(SAMPLES)
def test_maj_at_k_is_the_mean_vote_over_all_choices_of_k_samples(given_: Samples) -> None:
    samples, k = given_
    choices = [*combinations(range(len(samples)), k)]
    expected = sum(vote(samples, chosen) for chosen in choices) / len(choices)
    answers, correct = zip(*samples, strict=True)
    assert majority_at(k, answers, correct) == pytest.approx(expected)


def test_many_samples_keep_their_digits() -> None:
    answers, correct = [*range(128)] * 2, [True] * 128 + [False] * 128
    assert majority_at(1, answers, correct) == pytest.approx(0.5)
    assert majority_at(256, answers, correct) == pytest.approx(0.5)


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_one_sample_per_prompt_gives_wilsons_interval(correct: list[bool]) -> None:
    found = share_of([*map(float, correct)], [1] * len(correct))
    share = sum(correct) / len(correct)
    assert found == pytest.approx((share, *interval(share, len(correct))))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20).flatmap(
        lambda counts: st.tuples(
            st.just(counts), st.tuples(*(st.floats(0, 1).map(lambda x, n=n: x * n) for n in counts))
        )
    )
)
def test_samples_say_at_least_as_much_as_prompts_and_at_most_what_they_are(given_) -> None:
    counts, sums = given_
    assert len(counts) - 1e-9 <= effective_count(sums, counts) <= sum(counts) + 1e-9
    value, low, high = share_of(sums, counts)
    assert 0.0 <= low <= value + 1e-9
    assert value <= high + 1e-9
    assert high <= 1.0


def test_alike_samples_of_a_prompt_count_once_and_unlike_ones_each() -> None:
    assert effective_count([4, 0] * 50, [4] * 100) == pytest.approx(100, rel=0.02)
    assert effective_count([2] * 100, [4] * 100) == 100, "no spread at all says nothing of it"
    spread = [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4] * 10  # 4 tosses of a coin
    assert effective_count(spread, [4] * 160) == pytest.approx(640, rel=0.01)


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "alpha", "beta"),
    [
        (100, 1, 2.0, 1.0),
        (100, 4, 0.5, 0.5),
        (100, 4, 5.0, 5.0),
        (50, 8, 0.3, 3.0),
        (60, 4, 8, 0.5),
    ],
)
def test_the_interval_holds_the_true_accuracy_95_times_in_100(
    num_prompts: int, num_samples: int, alpha: float, beta: float
) -> None:
    """Prompts whose pass rates come from a beta distribution; without their clusters (as of
    independent samples) the interval would hold it far less often where prompts differ."""
    rng, num_runs, held, naive = np.random.default_rng(7), 1000, 0, 0
    true = alpha / (alpha + beta)
    for _ in range(num_runs):
        sums = rng.binomial(num_samples, rng.beta(alpha, beta, num_prompts)).tolist()
        value, low, high = share_of(sums, [num_samples] * num_prompts)
        held += low <= true <= high
        low, high = interval(value, num_samples * num_prompts)
        naive += low <= true <= high
    assert held / num_runs >= 0.92
    assert num_samples == 1 or naive < held


def test_the_margin_is_the_longer_side() -> None:
    assert with_margin(share_of([1.0] * 9 + [0.0], [1] * 10)) == "90.0% +-30.4"
