"""Decoupled PPO around a proximal policy; GMPO, SAPO and DPPO against numbers worked by hand;
rollouts that `algorithm.mask_rollouts` masks."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import AlgorithmConfig
from llamarl.core.records import NO_VERSION
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.clip import PPOConfig
from llamarl.trainer.losses.dppo import DPPOKLConfig, DPPOTVConfig
from llamarl.trainer.losses.gmpo import GMPOConfig
from llamarl.trainer.losses.sapo import SAPOConfig
from llamarl.trainer.policy_loss import (
    LossMetrics,
    empty_step_warning,
    interpolated,
    on_policy_warning,
    policy_loss,
    share_of_way,
)
from llamarl.trainer.policy_loss import statistics as step_statistics
from tests.loss_formulas import CONFIGS, PAPERS, Sampled
from tests.trainer.test_loss_formulas import PENALTIES, TOLERANCE, difference, ours, steps, theirs
from tests.trainer.test_loss_formulas import random_rollouts as without_prox
from tests.trainer.test_losses import example, loss_and_gradient


def random_rollouts(seed: int, spread: float) -> list[Sampled]:
    random = np.random.default_rng(seed + 100)

    def away(values: list[float]) -> list[float]:
        moved = np.array(values) + random.normal(0, spread, len(values))
        return np.minimum(moved, -1e-3).tolist()  # of a probability below 1

    return [replace(r, log_prox=away(r.log_pi)) for r in without_prox(seed, spread=spread)]


@pytest.mark.parametrize("algorithm", PAPERS)
def test_a_loss_around_a_proximal_policy_is_the_formula_s(algorithm: str) -> None:
    config = replace(CONFIGS[algorithm], **PENALTIES)
    for seed, spread in ((0, 0.02), (1, 1.0), (2, 4.0)):
        rollouts = random_rollouts(seed, spread)
        want = theirs(algorithm, rollouts, **PENALTIES)
        assert difference(ours(config, rollouts), want) < TOLERANCE
        around_mu = theirs(algorithm, [replace(r, log_prox=None) for r in rollouts], **PENALTIES)
        # Where nothing is clipped, (prox / mu) (pi / prox) is pi / mu.
        assert difference(want, around_mu) > 1e-4 or spread < 1, "it makes no difference"


@pytest.mark.parametrize("algorithm", PAPERS)
@settings(max_examples=30, deadline=None)
@given(rollouts=steps())
def test_around_mu_itself_it_is_the_plain_loss(algorithm: str, rollouts: list[Sampled]) -> None:
    around = [replace(rollout, log_prox=rollout.log_mu) for rollout in rollouts]
    config = CONFIGS[algorithm]
    assert difference(ours(config, around), ours(config, rollouts)) < TOLERANCE


def test_a_clip_around_the_proximal_policy_leaves_an_old_token_room() -> None:
    """AReaL, section 5.2: the token is twice as likely as when it was written, but the batch has
    not moved it yet."""
    old = Sampled([-1.0], [-1 - math.log(2)], [-1.0], [0.5], [1], 1.0)
    assert ours(PPOConfig(), [old]).by_log_pi == [[0.0]]
    assert ours(PPOConfig(), [replace(old, log_prox=[-1.0])]).by_log_pi[0][0] == pytest.approx(-2)
    moved = replace(old, log_prox=[-1 - math.log(1.3)])
    assert ours(PPOConfig(), [moved]).by_log_pi == [[0.0]]


def test_the_weight_of_age_is_bounded() -> None:
    far = Sampled([-1.0], [-9.0], [-1.0], [0.5], [1], 1.0, [-1.0])
    for rho in (1.0, 5.0, 40.0):
        found = ours(PPOConfig(proximal_rho=rho), [far])
        assert found.by_log_pi[0][0] == pytest.approx(-rho)


@given(
    first=st.integers(0, 20),
    steps_since=st.integers(0, 5),
    versions=st.lists(st.integers(-1, 25), min_size=1, max_size=6),
)
def test_the_share_of_the_way_grows(first: int, steps_since: int, versions: list[int]) -> None:
    version = first + steps_since
    written = [min(each, version) for each in versions]
    found = share_of_way(np.array(written, np.int32), first, version)
    for share, w in zip(found.tolist(), written, strict=True):
        if steps_since == 0:
            assert share == 1, "the first step of a batch: prox is pi"
        elif w >= first:
            assert share == 0, "written by the policy of the batch's beginning, or by a later one"
        else:
            assert share == pytest.approx((first - w) / (version - w))
    assert found.dtype == np.float32


def test_between_two_policies_that_move_evenly_the_interpolated_one_is_exact() -> None:
    """Each step adds 0.3 to log pi: written by 2, the batch begins at 5, trained at 7."""
    share = torch.from_numpy(share_of_way(np.array([2, 2, NO_VERSION], np.int32), 5, 7))
    log_mu = torch.tensor([-3.0, -1.0, 0.0])
    log_pi = (log_mu + 5 * 0.3).requires_grad_()
    found = interpolated(log_mu, log_pi, share)
    assert found[:2].tolist() == pytest.approx([-3 + 3 * 0.3, -1 + 3 * 0.3])
    assert not found.requires_grad


def test_whole_rollouts_are_masked_by_how_far_pi_is_from_mu_not_from_prox() -> None:
    far = Sampled([-1.0], [-3.0], [-1.0], [0.5], [1], 1.0, [-1.0])
    near = replace(far, log_mu=[-1.0], log_prox=[-3.0])
    config = PPOConfig(mask_rollouts="geometric_mean", mask_above=2.0)
    assert ours(config, [far]).by_log_pi == [[0.0]]
    assert ours(replace(config, clip_high=10.0), [near]).by_log_pi != [[0.0]]


def test_gmpo_bounds_tokens_before_it_takes_their_mean():
    # Rollout 0: log r is 0.69, which counts as 0.4, and -0.69; its mean is -0.1466. Rollout 1: 8,
    # as 3 by dual clip.
    ratio = math.exp((0.4 - math.log(2)) / 2)
    loss, gradient = loss_and_gradient(GMPOConfig())
    assert loss == pytest.approx(-ratio + 2 * 3)
    assert gradient == pytest.approx([0, -ratio / 2, 0])
    loss, gradient = loss_and_gradient(GMPOConfig(clip_ratio_c=1e9))
    assert loss == pytest.approx(-ratio + 2 * 8)
    assert gradient == pytest.approx([0, -ratio / 2, 2 * 8])


def test_sapo_fades_every_gradient_and_cuts_none():
    loss, gradient = loss_and_gradient(SAPOConfig(normalization="tokens"))
    gates = [4 / (1 + math.exp(-1)), 4 / (1 + math.exp(0.5)), 4 / 1.05 / (1 + math.exp(-7.35))]
    assert loss == pytest.approx(-gates[0] - gates[1] + 2 * gates[2])
    weights = [1 / math.cosh(x) ** 2 for x in (0.5, 0.25, 3.675)]
    assert gradient == pytest.approx([-2 * weights[0], -0.5 * weights[1], 2 * 8 * weights[2]])
    assert 0.2 > weights[2] * 8 > 0


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        # pi 0.368 0.135 0.607, mu 0.184 0.271 0.076: only the first moved as A wants it to
        (DPPOTVConfig(), (0, 1, 1)),
        (DPPOTVConfig(divergence_high=0.19), (1, 1, 1)),
        (DPPOKLConfig(), (0, 1, 1)),  # its divergence is 0.08093
        (DPPOKLConfig(divergence_high=0.0810), (1, 1, 1)),
        (DPPOKLConfig(divergence_high=0.0809), (0, 1, 1)),
    ],
)
def test_dppo_masks_by_the_move_of_the_probability(config, kept):
    _, gradient = loss_and_gradient(config)
    assert gradient == pytest.approx([-2 * kept[0], -0.5 * kept[1], 2 * 8 * kept[2]])
    _, gradient = loss_and_gradient(replace(config, rho=3))
    assert gradient == pytest.approx([-2 * kept[0], -0.5 * kept[1], 2 * 3 * kept[2]])


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
def test_a_step_is_that_without_the_masked_rollouts(algorithm, kind, low, high, negative_only):
    bounds = {"mask_below": low, "mask_above": high, "mask_negative_only": negative_only}
    config = replace(CONFIGS[algorithm], mask_rollouts=kind, kl_coefficient=0.3, **bounds)
    num_masked = 0
    for seed in range(8):
        rollouts = without_prox(seed, spread=0.6)
        left = [masked(each, kind, low, high, negative_only) for each in rollouts]
        num_masked += sum(a.weights != b.weights for a, b in zip(left, rollouts, strict=True))
        want = theirs(algorithm, left, kl_coefficient=0.3)
        assert difference(ours(config, rollouts), want) < TOLERANCE
    assert 0 < num_masked < 48


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
        ({"mask_rollouts": "k3", "mask_below": 0.5}, "algorithm.mask_below must be 0 for"),
    ],
)
def test_bounds_and_measure_come_together(fields, message):
    with pytest.raises(ValueError, match=message):
        AIPOConfig(**fields)
