"""Value and gradient of every loss, and the advantages, against the functions of verl and TRL."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.advantages import ADVANTAGES, apart, over_deviation
from llamarl.trainer.losses import algorithms
from llamarl.trainer.policy_loss import kl_penalty
from tests.parity import of_trl, of_verl
from tests.parity.rollouts import Padded, ours, random_rollouts

log = logging.getLogger(__name__)
pytestmark = pytest.mark.parity

STEPS = [(seed, spread) for seed in range(5) for spread in (0.02, 0.4, 1.0)]
TOLERANCE = 1e-7  # verl adds 1e-8 to some divisors
OFF = 1e9  # of dual clip
Found = tuple[float, torch.Tensor]
Theirs = Callable[[Padded], Found]


def config(name: str, **fields: Any) -> AlgorithmConfig:
    """The algorithm's own options but for these, without KL."""
    return replace(algorithms()[name](), **{"kl_coefficient": 0.0, **fields})


def verl(
    mode: str, average: str, correction: dict[str, Any] | None = None, **fields: Any
) -> Theirs:
    return lambda rollouts: of_verl.loss(mode, rollouts, average, correction, **fields)


def bypass(average: str, kind: str = "reinforce", **correction: Any) -> Theirs:
    return verl("bypass_mode", average, correction={"loss_type": kind, **correction})


def trl(**options: Any) -> Theirs:
    return lambda rollouts: of_trl.loss(rollouts, **options)


def clipped(low: float, high: float, c: float = 3.0) -> dict[str, float]:
    """verl's fields."""
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}


def epsilons(low: float, high: float) -> dict[str, float]:
    """TRL's options."""
    return {"epsilon_low": low, "epsilon_high": high}


def sequence_mask(rollouts: Padded) -> Found:
    """TRL's dapo with the rollouts masked whose product of ratios is above 3 or below 0.2."""
    made = of_trl.generated(
        rollouts,
        np.random.default_rng(0).normal(size=(6, 1, 4)),
        np.ones(1),
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_min=0.2,
        vllm_importance_sampling_clip_max=3.0,
    )
    ratios = (made["importance_sampling_ratio"] > 0).double()  # a mask: the loss has the ratio
    return of_trl.loss(rollouts, ratios, loss_type="dapo", delta=3.0)


MEAN = {"mask_rollouts": "geometric_mean", "mask_below": 0.9, "mask_above": 1.2}
MEAN_1 = f"{1 / 1.2}_{1 / 0.9}"  # verl's bounds are of mu / pi
PRODUCT = {"mask_rollouts": "product", "mask_below": 0.2, "mask_above": 3.0}
K3 = {"mask_rollouts": "k3", "mask_above": 0.1}
NEGATIVE = {"mask_rollouts": "geometric_mean", "mask_below": math.exp(-0.1)}
NEGATIVE |= {"mask_negative_only": True}

CASES: dict[str, tuple[AlgorithmConfig, Theirs]] = {
    "ppo, verl": (config("ppo"), verl("vanilla", "tokens")),
    "grpo, verl": (config("grpo"), verl("vanilla", "rollouts")),
    "dr_grpo, verl": (config("dr_grpo"), verl("vanilla", "constant")),
    "dapo, verl": (config("dapo"), verl("vanilla", "tokens", **clipped(0.2, 0.28))),
    "cispo, verl": (config("cispo"), verl("cispo", "tokens", **clipped(1.0, 4.0))),
    "gspo, verl": (
        config("gspo", clip_ratio_c=OFF),
        verl("gspo", "rollouts", **clipped(0.015, 0.02)),
    ),
    "gmpo, verl": (
        config("gmpo", clip_ratio_c=OFF),
        verl("geo_mean", "rollouts", **clipped(0.4, 0.4)),
    ),
    "sapo, verl": (config("sapo"), verl("sapo", "rollouts")),
    "dppo_tv, verl": (
        config("dppo_tv"),
        verl("dppo_tv", "constant", **clipped(0.15, 0.15, 20)),
    ),
    "dppo_kl, verl": (
        config("dppo_kl"),
        verl("dppo_kl", "constant", **clipped(0.05, 0.05, 20)),
    ),
    "reinforce, verl": (config("reinforce"), bypass("tokens")),
    "rloo, verl": (config("rloo"), bypass("tokens")),
    "aipo, verl": (
        config("aipo"),
        bypass("tokens", rollout_is="token", rollout_is_threshold=4.0),
    ),
    "ppo masked by the mean, verl": (
        config("ppo", **MEAN),
        bypass("tokens", "ppo_clip", rollout_rs="seq_mean_k1", rollout_rs_threshold=MEAN_1),
    ),
    "ppo masked by the product, verl": (
        config("ppo", **PRODUCT),
        bypass("tokens", "ppo_clip", rollout_rs="seq_sum_k1", rollout_rs_threshold=f"{1 / 3}_5.0"),
    ),
    "aipo masked by k3, verl": (
        config("aipo", **K3),
        bypass(
            "tokens",
            rollout_is="token",
            rollout_is_threshold=4.0,
            rollout_rs="seq_mean_k3",
            rollout_rs_threshold=0.1,
        ),
    ),
    "ppo, TRL": (config("ppo"), trl(loss_type="dapo", delta=3.0)),
    "grpo, TRL": (
        config("grpo", clip_ratio_c=OFF, kl_coefficient=0.04),
        trl(loss_type="grpo", beta=0.04),
    ),
    "dr_grpo, TRL": (config("dr_grpo", clip_ratio_c=OFF), trl(loss_type="dr_grpo")),
    "dapo, TRL": (
        config("dapo", clip_ratio_c=OFF),
        trl(loss_type="dapo", **epsilons(0.2, 0.28)),
    ),
    "cispo, TRL": (config("cispo"), trl(loss_type="cispo", epsilon_high=5.0)),
    "gspo, TRL": (
        config("gspo", clip_ratio_c=OFF),
        trl(loss_type="grpo", importance_sampling_level="sequence", **epsilons(0.015, 0.02)),
    ),
    "sapo, TRL": (config("sapo"), trl(loss_type="sapo")),
    "ppo masked by the product, TRL": (config("ppo", **PRODUCT), sequence_mask),
    "grpo masked where negative, TRL": (
        config("grpo", clip_ratio_c=OFF, **NEGATIVE),
        trl(loss_type="grpo", off_policy_mask_threshold=0.1),
    ),
}


def differences(name: str) -> tuple[float, float]:
    """The largest of value and of gradient, relative to the largest gradient of the step."""
    mine, theirs = CASES[name]
    value = gradient = 0.0
    for seed, spread in STEPS:
        rollouts = random_rollouts(seed, spread)
        (loss, slopes), (other, others) = ours(mine, rollouts), theirs(rollouts)
        scale = slopes.abs().max().item()
        assert scale > 0
        value = max(value, abs(loss - other) / max(1.0, abs(other)))
        gradient = max(gradient, (slopes - others).abs().max().item() / scale)
    return value, gradient


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_theirs(name):
    value, gradient = differences(name)
    log.info("%s: value %.1e, gradient %.1e", name, value, gradient)  # shown with -rP
    assert value < TOLERANCE
    assert gradient < TOLERANCE


def test_every_loss_of_rewards_is_compared():
    """Those of demonstrations and teachers have their own oracles (test_losses.py)."""
    compared = {name.split(",")[0].split(" ")[0] for name in CASES}
    assert compared == algorithms().keys() - {"task", "sft", "distill"}


@pytest.mark.parametrize("name", [name for name in CASES if "masked" in name])
def test_the_masks_that_are_compared_mask_some_rollouts(name):
    mine, _ = CASES[name]
    off = replace(
        mine, mask_rollouts="off", mask_below=0.0, mask_above=1e9, mask_negative_only=False
    )
    changed = []
    for step in STEPS:
        rollouts = random_rollouts(*step)
        (_, slopes), (_, without) = ours(mine, rollouts), ours(off, rollouts)
        changed.append((slopes == 0).all(1) & (without != 0).any(1))
    share = torch.cat(changed).double().mean().item()
    assert 0.02 < share < 0.98


@pytest.mark.parametrize(
    ("estimator", "name"), [("k1", "kl+"), ("k2", "mse"), ("k3", "low_var_kl")]
)
def test_kl_estimators_are_verl_s_where_it_clamps_nothing(estimator, name):
    d = torch.linspace(-2.5, 8, 50, dtype=torch.float64)
    leaf, other = d.clone().requires_grad_(), d.clone().requires_grad_()
    mine, theirs = kl_penalty(leaf, estimator), of_verl.kl_penalty(other, torch.zeros(50), name)
    for found in (mine, theirs):
        found.sum().backward()
    assert leaf.grad is not None
    assert other.grad is not None
    assert theirs.tolist() == pytest.approx(mine.tolist(), abs=1e-12)
    assert other.grad.tolist() == pytest.approx(leaf.grad.tolist(), abs=1e-12)


WEIGHTS = np.array([1.0, 0.25, -0.5])


def some_rewards(num_functions: int) -> np.ndarray:
    """[groups, functions, rollouts], float64."""
    return np.random.default_rng(1).choice([0.0, 0.5, 1.0, 7.0], (6, num_functions, 4))


def test_gdpo_is_theirs():
    """verl adds 1e-6 in float32, TRL 1e-4, to deviations over n - 1: both cancel but for that."""
    rewards = some_rewards(3)
    groups = [apart(list(zip(WEIGHTS, group, strict=True))) for group in rewards]
    mine = np.array(over_deviation(np.concatenate(groups).tolist()))
    theirs = of_verl.advantages("gdpo", rewards, WEIGHTS).ravel()
    rows = math.sqrt((mine.size - 1) / mine.size)  # the deviation of the batch is over n - 1 there
    assert theirs == pytest.approx(mine * rows, rel=1e-5, abs=1e-5)
    made = of_trl.generated(
        random_rollouts(0, 0.4),
        rewards,
        WEIGHTS,
        multi_objective_aggregation="normalize_then_sum",
        scale_rewards="group",
    )
    assert made["advantages"].numpy() == pytest.approx(mine * rows, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(
    ("advantage", "estimator", "scale"),
    [("mean_std", "grpo", "group"), ("leave_one_out", "rloo", None), ("mean", None, "none")],
)
def test_advantages_of_one_reward_are_theirs(advantage, estimator, scale):
    rewards = some_rewards(1)
    mine = np.array([ADVANTAGES[advantage](group[0].tolist()) for group in rewards])
    if advantage == "mean_std":  # over n - 1 there
        mine *= math.sqrt(3 / 4)
    if estimator is not None:
        theirs = of_verl.advantages(estimator, rewards, np.ones(1))
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-5)
    if scale is not None:
        made = of_trl.generated(
            random_rollouts(0, 0.4),
            rewards,
            np.ones(1),
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=scale,
        )
        assert made["advantages"].numpy() == pytest.approx(mine.ravel(), rel=1e-3, abs=1e-3)
