"""Which rollouts `algorithm.mask_rollouts` masks, against a plain loop, and that a masked rollout
has no part in a step but for its place in the divisor."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.policy_loss import (
    LossMetrics,
    empty_step_warning,
    on_policy_warning,
    policy_loss,
)
from llamarl.trainer.policy_loss import statistics as step_statistics
from tests.loss_formulas import CONFIGS, PAPERS, Sampled
from tests.unit.test_loss_formulas import (
    TOLERANCE,
    difference,
    ours,
    random_rollouts,
    steps,
    theirs,
)
from tests.unit.test_losses import example

BOUNDS = [
    ("geometric_mean", 0.9, 1.1),
    ("geometric_mean", 0.0, 1.1),
    ("product", 0.5, 1e9),
    ("product", 0.2, 3.0),
    ("k3", 0.0, 0.15),
]


def measure(kind: str, rollout: Sampled) -> float:
    """The paper's number for a rollout, token by token."""
    logs = [
        pi - mu
        for pi, mu, weight in zip(rollout.log_pi, rollout.log_mu, rollout.weights, strict=True)
        if weight
    ]
    if not logs:
        return 0.0 if kind == "k3" else 1.0
    if kind == "k3":
        return statistics.fmean(math.exp(x) - 1 - x for x in logs)
    total = math.fsum(logs)
    return math.exp(total / len(logs) if kind == "geometric_mean" else total)


def masked(rollout: Sampled, kind: str, low: float, high: float, negative_only: bool) -> Sampled:
    """The rollout without a weight if it is to be masked."""
    is_far = not low <= measure(kind, rollout) <= high
    if is_far and (rollout.advantage < 0 or not negative_only):
        return replace(rollout, weights=[0] * len(rollout.weights))
    return rollout


@pytest.mark.parametrize("negative_only", [False, True])
@pytest.mark.parametrize(("kind", "low", "high"), BOUNDS)
@pytest.mark.parametrize("algorithm", PAPERS)
def test_with_every_loss_a_step_is_that_without_the_masked_rollouts(
    algorithm, kind, low, high, negative_only
):
    bounds = {"mask_below": low, "mask_above": high, "mask_negative_only": negative_only}
    config = replace(CONFIGS[algorithm], mask_rollouts=kind, kl_coefficient=0.3, **bounds)
    num_masked = 0
    for seed in range(8):
        rollouts = random_rollouts(seed, spread=0.6)
        left = [masked(each, kind, low, high, negative_only) for each in rollouts]
        num_masked += sum(a.weights != b.weights for a, b in zip(left, rollouts, strict=True))
        want = theirs(algorithm, left, kl_coefficient=0.3)
        assert difference(ours(config, rollouts), want) < TOLERANCE
    assert 0 < num_masked < 48


@pytest.mark.parametrize(("kind", "low", "high"), BOUNDS)
@settings(max_examples=50, deadline=None)
@given(rollouts=steps())
def test_whatever_the_ratios_the_rollouts_beyond_the_bounds_are_masked(kind, low, high, rollouts):
    config = replace(CONFIGS["reinforce"], mask_rollouts=kind, mask_below=low, mask_above=high)
    left = [masked(each, kind, low, high, False) for each in rollouts]
    assert difference(ours(config, rollouts), theirs("reinforce", left)) < TOLERANCE


def test_the_tokens_of_masked_rollouts_are_counted_and_lose_their_weight():
    # Rollout 0 has ratios 2 and 1/2, so a geometric mean of 1; rollout 1 has one token with 8.
    config = AIPOConfig(mask_rollouts="geometric_mean", mask_below=0.5, mask_above=2)
    inputs = example()
    outputs = policy_loss(inputs, config)
    assert outputs.weights.tolist() == [1, 1, 0]
    assert inputs.weights.tolist() == [1, 1, 1]
    assert outputs.sums["drifted"].item() == 1
    assert outputs.sums["tokens"].item() == 2
    assert outputs.ratio_max.item() == pytest.approx(2)
    stale = policy_loss(example(weights=(1, 1, 0)), config)
    assert stale.sums["drifted"].item() == 0, "what had no weight has not lost it here"


def scalars_of(config: AlgorithmConfig) -> dict[str, float]:
    loss_metrics = LossMetrics()
    loss_metrics.add(policy_loss(example(), config), 3)
    return step_statistics(loss_metrics.vector()[None], 3.0)


def test_a_first_step_that_masks_rollouts_is_warned_of():
    scalars = scalars_of(AIPOConfig(rho=100, mask_rollouts="product", mask_above=4))
    assert scalars["drifted_tokens"] == 1
    assert "the first step masked 33% of its tokens" in (on_policy_warning(scalars) or "")
    assert on_policy_warning(scalars_of(AIPOConfig(rho=100))) is None


def test_a_step_that_is_masked_as_a_whole_says_by_which_option():
    config = AIPOConfig(mask_rollouts="k3", mask_above=0.01)
    warning = empty_step_warning(scalars_of(config), masks_truncated=False)
    assert warning is not None
    assert "all tokens that could be trained are of rollouts that" in warning
    assert "algorithm.mask_rollouts" in warning


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_rollouts": "k1"}, "algorithm.mask_rollouts must be one of off, geometric_mean"),
        ({"mask_rollouts": "product"}, "algorithm.mask_above must be a bound"),
        ({"mask_above": 2.0}, "algorithm.mask_above must be left out without"),
        ({"mask_below": 0.5}, "algorithm.mask_below must be left out without"),
        ({"mask_negative_only": True}, "algorithm.mask_negative_only must be left out without"),
        (
            {"mask_rollouts": "k3", "mask_below": 0.5},
            "algorithm.mask_below must be 0 for algorithm.mask_rollouts=k3",
        ),
    ],
)
def test_bounds_and_measure_come_together(fields, message):
    with pytest.raises(ValueError, match=message):
        AIPOConfig(**fields)
