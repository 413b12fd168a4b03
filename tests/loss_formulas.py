"""Every algorithm written out from its paper in plain Python floats, token by token.

The formulas share no code with `llamarl.algorithms`: where that takes minima of tensors, this asks
in which case a token is and writes down value and derivative of that case. No autograd.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.cispo import CISPOConfig
from llamarl.trainer.losses.clip import DAPOConfig, DrGRPOConfig, GRPOConfig, PPOConfig
from llamarl.trainer.losses.distill import DistillConfig
from llamarl.trainer.losses.dppo import DPPOKLConfig, DPPOTVConfig
from llamarl.trainer.losses.gmpo import GMPOConfig
from llamarl.trainer.losses.gspo import GSPOConfig
from llamarl.trainer.losses.reinforce import ReinforceConfig, RLOOConfig
from llamarl.trainer.losses.sapo import SAPOConfig
from llamarl.trainer.losses.sft import SFTConfig

CONFIGS: dict[str, AlgorithmConfig] = {
    "aipo": AIPOConfig(),
    "reinforce": ReinforceConfig(),
    "rloo": RLOOConfig(),
    "ppo": PPOConfig(),
    "grpo": GRPOConfig(),
    "dr_grpo": DrGRPOConfig(),
    "dapo": DAPOConfig(),
    "cispo": CISPOConfig(),
    "gspo": GSPOConfig(),
    "gmpo": GMPOConfig(),
    "sapo": SAPOConfig(),
    "dppo_tv": DPPOTVConfig(),
    "dppo_kl": DPPOKLConfig(),
    "sft": SFTConfig(),
    "distill": DistillConfig(teacher="t", teacher_coefficient=0.7, reward_coefficient=0.5),
}
# algorithm: (baseline, the sum is averaged over, lower bound, upper bound); the bounds are of the
# ratio, but of its log for gmpo, and of how far a probability may fall and rise for dppo
PAPERS = {
    "aipo": ("mean", "tokens", None, 4.0),
    "reinforce": ("mean", "tokens", None, None),
    "rloo": ("others", "tokens", None, None),
    "ppo": ("mean", "tokens", 0.8, 1.2),
    "grpo": ("standardised", "rollouts", 0.8, 1.2),
    "dr_grpo": ("mean", "constant", 0.8, 1.2),
    "dapo": ("standardised", "tokens", 0.8, 1.28),
    "cispo": ("standardised", "tokens", None, 5.0),
    "gspo": ("standardised", "rollouts", 0.985, 1.02),
    "gmpo": ("standardised", "rollouts", -0.4, 0.4),
    "sapo": ("standardised", "rollouts", None, None),
    "dppo_tv": ("mean", "constant", 0.15, 0.15),
    "dppo_kl": ("mean", "constant", 0.05, 0.05),
    "sft": ("none", "tokens", None, None),
    "distill": ("mean", "tokens", None, 4.0),
}
NO_BOUNDS = ("reinforce", "rloo", "sapo", "sft")  # these clip nothing
NO_RATIO = ("reinforce", "rloo", "sft")
NO_ADVANTAGE = ("sft",)
DUAL_CLIP = 3.0
MOST_WEIGHT = 20.0  # of dppo
AGE_BOUND = 5.0  # of prox / mu
KL_COEFFICIENTS = {"grpo": 0.04}


@dataclass
class Sampled:
    """One rollout: log-probs and entropy by token; a token with weight 0 is only context.
    `log_prox` is of the policy that ratios are taken to, where that is not mu."""

    log_pi: list[float]
    log_mu: list[float]
    log_ref: list[float]
    entropy: list[float]
    weights: list[int]
    advantage: float
    log_prox: list[float] | None = None


def advantages(algorithm: str, rewards: list[float]) -> list[float]:
    baseline = PAPERS[algorithm][0]
    if baseline == "others":
        total = sum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
    if baseline == "none":
        return rewards
    mean = statistics.fmean(rewards)
    if baseline == "mean":
        return [reward - mean for reward in rewards]
    spread = statistics.pstdev(rewards)
    return [(reward - mean) / spread if spread else 0.0 for reward in rewards]


def surrogate(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """(PPO's loss with dual clip, its derivative by the log of the ratio)."""
    if advantage >= 0:
        if ratio > high:
            return -high * advantage, 0.0
    else:
        if ratio < low:
            return -low * advantage, 0.0
        if ratio > DUAL_CLIP:
            return -DUAL_CLIP * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def soft_gate(ratio: float, advantage: float) -> tuple[float, float]:
    """(SAPO's loss, its derivative by the log of the ratio)."""
    tau = 1.0 if advantage > 0 else 1.05
    x = min(tau * (ratio - 1) / 2, 300.0)  # beyond that cosh overflows
    return -2 / tau * (1 + math.tanh(x)) * advantage, -ratio / math.cosh(x) ** 2 * advantage


def may_move(algorithm: str, pi: float, mu: float, advantage: float) -> bool:
    """Whether DPPO lets a token become likelier (advantage above 0), or less likely."""
    most = PAPERS[algorithm][3 if advantage > 0 else 2]
    if (pi < mu) == (advantage > 0) or pi == mu:
        return True  # it moved the other way
    if algorithm == "dppo_tv":
        return abs(pi - mu) <= most
    rest_mu, rest_pi = (max(1 - p, 1e-8) for p in (mu, pi))  # float32 rounds a sure token to 1
    return mu * math.log(mu / pi) + rest_mu * math.log(rest_mu / rest_pi) <= most


def geometric(logs: list[float], advantage: float, low: float, high: float) -> tuple[float, bool]:
    """(GMPO's ratio of a rollout, whether dual clip bounds it), from the logs of its tokens'."""
    bounded = [min(x, high) if advantage > 0 else max(x, low) for x in logs]
    ratio = math.exp(statistics.fmean(bounded)) if logs and advantage else 1.0
    if advantage < 0 and ratio > DUAL_CLIP:
        return DUAL_CLIP, True
    return ratio, False


def divergence(d: float, estimator: str) -> tuple[float, float]:
    """(estimate of KL(pi || ref), what multiplies grad log pi) at d = log pi - log ref."""
    if estimator == "k1":
        return d, d
    if estimator == "k2":
        return d * d / 2, d
    if d >= -3:
        return math.exp(-d) - 1 + d, 1 - math.exp(-d)
    at_3 = math.exp(3) - 4
    return at_3 + (math.exp(3) - 1) * (-3 - d), 1 - math.exp(3)


def token_terms(
    algorithm: str, rollout: Sampled, bounds: tuple[float, float] | None
) -> tuple[list[float], list[float]]:
    """(loss, derivative by log pi) of every token, without KL and entropy."""
    if rollout.log_prox is not None:
        return decoupled_terms(algorithm, rollout, bounds)
    low, high = bounds or PAPERS[algorithm][2:]
    a = rollout.advantage
    losses, slopes = [], []
    trained = [
        pi - mu
        for pi, mu, weight in zip(rollout.log_pi, rollout.log_mu, rollout.weights, strict=True)
        if weight
    ]
    columns = rollout.log_pi, rollout.log_mu, rollout.log_ref
    for log_pi, log_mu, log_ref in zip(*columns, strict=True):
        if algorithm == "sft":
            loss, slope = -log_pi, -1.0
        elif algorithm == "distill":  # coefficients 0.5 and 0.7, gaps of 5 nats at most
            weight = math.exp(min(log_pi - log_mu, math.log(high)))
            slope = -weight * (0.5 * a + 0.7 * min(max(log_ref - log_pi, -5.0), 5.0))
            loss = slope * log_pi
        elif algorithm in ("reinforce", "rloo"):
            loss, slope = -a * log_pi, -a
        elif algorithm in ("aipo", "cispo"):
            weight = math.exp(min(log_pi - log_mu, math.log(high)))
            loss, slope = -weight * a * log_pi, -weight * a
        elif algorithm == "gspo":
            # n trained tokens have this loss each, and log s moves by 1/n with every log pi.
            s = math.exp(sum(trained) / len(trained)) if trained else 1.0
            loss, slope = surrogate(s, a, low, high)
        elif algorithm == "gmpo":
            m, is_bounded = geometric(trained, a, low, high)
            x = log_pi - log_mu
            is_flat = is_bounded or (x > high if a > 0 else x < low)
            loss, slope = -m * a, 0.0 if is_flat else -m * a
        elif algorithm == "sapo":
            loss, slope = soft_gate(math.exp(log_pi - log_mu), a)
        elif algorithm in ("dppo_tv", "dppo_kl"):
            weight = min(math.exp(log_pi - log_mu), MOST_WEIGHT)
            if not may_move(algorithm, math.exp(log_pi), math.exp(log_mu), a):
                weight = 0.0
            loss, slope = -weight * a * log_pi, -weight * a
        else:
            loss, slope = surrogate(math.exp(log_pi - log_mu), a, low, high)
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


def decoupled_terms(
    algorithm: str, rollout: Sampled, bounds: tuple[float, float] | None
) -> tuple[list[float], list[float]]:
    """The same with prox in the place of mu, each token's loss times prox / mu, at most 5."""
    assert rollout.log_prox is not None
    losses, slopes = token_terms(
        algorithm, replace(rollout, log_mu=rollout.log_prox, log_prox=None), bounds
    )
    pairs = zip(rollout.log_prox, rollout.log_mu, strict=True)
    ages = [min(math.exp(prox - mu), AGE_BOUND) for prox, mu in pairs]
    by_token = ages
    if algorithm in ("gspo", "gmpo"):  # every token's loss moves with every log pi of the rollout
        trained = [age for age, weight in zip(ages, rollout.weights, strict=True) if weight]
        by_token = [sum(trained) / max(1, len(trained))] * len(ages)
    return (
        [loss * age for loss, age in zip(losses, ages, strict=True)],
        [slope * age for slope, age in zip(slopes, by_token, strict=True)],
    )


def step(
    algorithm: str,
    rollouts: list[Sampled],
    *,
    max_tokens: int,
    averaged_over: str | None = None,
    kl_coefficient: float | None = None,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
    bounds: tuple[float, float] | None = None,
) -> tuple[float, list[list[float]], list[list[float]]]:
    """(the step's loss, its derivative by every log pi, by every entropy)."""
    averaged_over = averaged_over or PAPERS[algorithm][1]
    if kl_coefficient is None:
        kl_coefficient = KL_COEFFICIENTS.get(algorithm, 0.0)
    total, by_log_pi, by_entropy = 0.0, [], []
    for rollout in rollouts:
        num_tokens = len(rollout.log_pi)
        share = {
            "tokens": 1 / sum(len(other.log_pi) for other in rollouts),
            "rollouts": 1 / (len(rollouts) * num_tokens),
            "constant": 1 / (len(rollouts) * max_tokens),
        }[averaged_over]
        losses, slopes = token_terms(algorithm, rollout, bounds)
        by_log_pi.append([0.0] * num_tokens)
        by_entropy.append([0.0] * num_tokens)
        for t in range(num_tokens):
            if rollout.weights[t] == 0:
                continue
            kl, kl_slope = divergence(rollout.log_pi[t] - rollout.log_ref[t], kl_estimator)
            total += share * (
                losses[t] + kl_coefficient * kl - entropy_coefficient * rollout.entropy[t]
            )
            by_log_pi[-1][t] = share * (slopes[t] + kl_coefficient * kl_slope)
            by_entropy[-1][t] = -share * entropy_coefficient
    return total, by_log_pi, by_entropy
