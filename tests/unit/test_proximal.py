"""Decoupled PPO: the losses around a proximal policy, and the policy between two others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.records import NO_VERSION
from llamarl.trainer.losses.clip import PPOConfig
from llamarl.trainer.policy_loss import interpolated, share_of_way
from tests.loss_formulas import CONFIGS, PAPERS, Sampled
from tests.unit.test_loss_formulas import PENALTIES, TOLERANCE, difference, ours, steps, theirs
from tests.unit.test_loss_formulas import random_rollouts as without_prox


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
def test_the_share_of_the_way_grows_from_mu_to_pi_with_the_versions_between(
    first: int, steps_since: int, versions: list[int]
) -> None:
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
