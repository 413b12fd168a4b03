"""From log-probs and advantages to a loss: one pure function per algorithm.

Owns: the per-token losses, the KL and entropy terms, the sums reported with them and the number
the step's gradient is divided by. Does not own: advantages, collectives, masks. Invariant: a loss
is a sum over tokens, so the gradient of a step is the same however it is cut into micro-batches
and ranks; `denominator` scales it once at the end.

Words: per token t of rollout i, pi is the trainer's probability, mu the generator's, ref the
reference's, ratio r = pi / mu, A the advantage. Every log-prob is at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llamarl.config import (
    AIPOConfig,
    AlgorithmConfig,
    CISPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
)
from llamarl.config.algorithm import ClipConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The response tokens of whole rollouts, packed one after another (N tokens, R rollouts).

    `weights` is 1 for a trained token and 0 for one that is only context (too stale, truncated);
    a token of weight 0 has no part in the loss, its gradient or the metrics.
    `rollout_lengths` counts response tokens, those of weight 0 included.
    """

    trainer_logprobs: Tensor  # float32 [N], log pi, with gradient
    generator_logprobs: Tensor  # float32 [N], log mu
    advantages: Tensor  # float32 [N]
    weights: Tensor  # float32 [N], 0 or 1
    entropy: Tensor  # float32 [N], nats; with gradient if there is an entropy bonus
    rollout_index: Tensor  # int64 [N], which rollout (0..R-1) a token belongs to
    rollout_lengths: Tensor  # int64 [R]
    ref_logprobs: Tensor | None = None  # float32 [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The loss of these tokens, not yet divided, and detached scalars to reduce over ranks.

    `sums` adds up over micro-batches and ranks: tokens (of weight 1), ratio, clipped (tokens whose
    ratio the algorithm cut), kl (mu to pi, estimator k3), entropy, ref_kl. `ratio_max` is a
    maximum, 0 without trained tokens.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor


TokenLoss = Callable[[LossInputs, Tensor, Any], tuple[Tensor, Tensor]]
"""(inputs, log ratio [N] with gradient and 0 where weight is 0, config of that algorithm)
-> (loss [N], clipped [N] bool)."""


def aipo(inputs: LossInputs, log_ratio: Tensor, config: AIPOConfig) -> tuple[Tensor, Tensor]:
    """LlamaRL section 6 (arXiv 2505.24034): - sg(min(r, rho)) A log pi.

    The gradient is - min(r, rho) A grad log pi: a token above rho keeps the weight rho, where
    differentiating min(r, rho) A itself would give it none.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(max=config.rho)
    return -weight * inputs.advantages * inputs.trainer_logprobs, ratio > config.rho


def reinforce(
    inputs: LossInputs, log_ratio: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE and RLOO (arXiv 2402.14740): - A log pi, whatever wrote the token."""
    clipped = torch.zeros_like(log_ratio, dtype=torch.bool)
    return -inputs.advantages * inputs.trainer_logprobs, clipped


def clip(inputs: LossInputs, log_ratio: Tensor, config: ClipConfig) -> tuple[Tensor, Tensor]:
    """PPO (arXiv 1707.06347, eq. 7): - min(r A, clip(r, 1 - low, 1 + high) A).

    GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783) and DAPO (2503.14476) are this loss with other
    baselines, normalisations and bounds. A token is clipped, and without gradient, if the clipped
    term is the smaller one.
    """
    return _clipped_surrogate(log_ratio.exp(), inputs.advantages, config)


def cispo(inputs: LossInputs, log_ratio: Tensor, config: CISPOConfig) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): - sg(clip(r, 1 - low, 1 + high)) A log pi."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * inputs.advantages * inputs.trainer_logprobs, weight != ratio


def gspo(inputs: LossInputs, log_ratio: Tensor, config: GSPOConfig) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071, eq. 5 to 7): PPO's clip on one ratio per rollout.

        s_i = exp(mean over the rollout's trained tokens of log r)

    Every token of the rollout carries the rollout's term - min(s A, clip(s) A), so that
    normalization `rollouts` gives the paper's mean over rollouts.
    """
    zeros = torch.zeros_like(inputs.rollout_lengths, dtype=log_ratio.dtype)
    total = zeros.index_add(0, inputs.rollout_index, log_ratio)
    num_trained = zeros.index_add(0, inputs.rollout_index, inputs.weights.to(zeros.dtype))
    mean = total / num_trained.clamp(min=1)
    return _clipped_surrogate(mean.exp()[inputs.rollout_index], inputs.advantages, config)


LOSSES: dict[type[AlgorithmConfig], TokenLoss] = {
    AIPOConfig: aipo,
    ReinforceConfig: reinforce,
    RLOOConfig: reinforce,
    PPOConfig: clip,
    GRPOConfig: clip,
    DrGRPOConfig: clip,
    DAPOConfig: clip,
    CISPOConfig: cispo,
    GSPOConfig: gspo,
}


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The summed loss of these tokens under the algorithm that `config`'s class names.

        sum_t w_t (algorithm's loss_t + kl_coefficient * kl_t - entropy_coefficient * entropy_t)

    With normalization `rollouts` each rollout's sum is divided by its own length. Backward on
    `loss`, add gradients up over all rows of the step, then divide once by `denominator`.

    Raises ValueError if a KL penalty is asked for without `ref_logprobs`.
    """
    if config.kl_coefficient > 0 and inputs.ref_logprobs is None:
        raise ValueError("ref_logprobs must be given for algorithm.kl_coefficient > 0, got None")
    trained = inputs.weights > 0
    # Chosen before exp: an overflow on a token without weight would turn 0 * inf into NaN.
    log_ratio = torch.where(trained, inputs.trainer_logprobs - inputs.generator_logprobs, 0.0)
    loss, clipped = LOSSES[type(config)](inputs, log_ratio, config)
    ref_kl = torch.zeros_like(log_ratio)
    if inputs.ref_logprobs is not None:
        log_ref_ratio = torch.where(trained, inputs.trainer_logprobs - inputs.ref_logprobs, 0.0)
        ref_kl = kl_penalty(log_ref_ratio, config.kl_estimator)
    if config.kl_coefficient > 0:
        loss = loss + config.kl_coefficient * ref_kl
    if config.entropy_coefficient != 0:
        loss = loss - config.entropy_coefficient * inputs.entropy
    if config.normalization == "rollouts":
        loss = loss / inputs.rollout_lengths[inputs.rollout_index]
    with torch.no_grad():
        ratio = log_ratio.exp()
        values = {
            "tokens": torch.ones_like(ratio),
            "ratio": ratio,
            "clipped": clipped.to(ratio.dtype),
            "kl": ratio - 1 - log_ratio,
            "entropy": inputs.entropy,
            "ref_kl": ref_kl,
        }
        sums = {name: torch.where(trained, value, 0.0).sum() for name, value in values.items()}
        ratio_max = torch.cat([ratio[trained], ratio.new_zeros(1)]).max()
    total = torch.where(trained, loss, 0.0).sum()
    return LossOutputs(loss=total, sums=sums, ratio_max=ratio_max)


def kl_penalty(log_ref_ratio: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref), from d = log pi - log ref [N] with gradient.

        estimator   value            gradient (times grad log pi)
        k1          d                d
        k2          d^2 / 2          d
        k3          e^-d - 1 + d     1 - e^-d

    On tokens drawn from pi, d grad log pi is the true gradient of KL(pi || ref). k2 has it by
    plain differentiation; k1 does not (grad d averages to zero), so it is given the score-function
    form. k3 is differentiated as GRPO writes it: low variance and never negative, but its gradient
    is that of KL(ref || pi), equal to first order near the reference. No estimator is weighted by
    pi / mu: tokens a few versions old bias the penalty slightly, as in GRPO.
    """
    if estimator == "k1":
        value = log_ref_ratio.detach()
        return value + value * (log_ref_ratio - value)
    if estimator == "k2":
        return log_ref_ratio.square() / 2
    return torch.exp(-log_ref_ratio) - 1 + log_ref_ratio


def denominator(
    num_tokens: int, num_rollouts: int, max_tokens: int, config: AlgorithmConfig
) -> float:
    """The number that the summed gradient of a whole step is divided by.

        tokens     num_tokens                     rollouts   num_rollouts
        constant   num_rollouts * max_tokens

    Both counts cover every rollout of the step and all its response tokens, those with advantage 0
    or weight 0 included: what contributes nothing may be left out of the forward pass without
    changing the gradient, and masking a token never makes the others louder.
    """
    if config.normalization == "rollouts":
        return float(num_rollouts)
    if config.normalization == "constant":
        return float(num_rollouts * max_tokens)
    return float(num_tokens)


def is_inert(advantage: float, config: AlgorithmConfig) -> bool:
    """True if a rollout with this advantage has no gradient, so its forward may be skipped."""
    return advantage == 0 and config.kl_coefficient == 0 and config.entropy_coefficient == 0


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, config: ClipConfig
) -> tuple[Tensor, Tensor]:
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free
