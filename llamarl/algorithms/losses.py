"""From log-probs and advantages to a loss: one pure function per algorithm.

Owns: the per-token losses, the KL and entropy terms, the sums reported with them and the number
the step's gradient is divided by. Does not own: advantages, collectives, masks. Invariant: a loss
is a sum over tokens, so the gradient of a step is the same however it is cut into micro-batches
and ranks; `denominator` scales it once at the end.

Words: per token t of rollout i, pi is the trainer's probability, mu the generator's, ref the
reference's, ratio r = pi / mu, A the advantage, sg() is stop-gradient. Every log-prob is at the
sampling temperature.

What holds for every table below, against TRL 1.10 (GRPOTrainer, RLOOTrainer) and verl 0.8:

    mu           Here the probability that the generator recorded when it sampled the token, so r
                 corrects staleness and engine in one, as in verl's bypass mode. By default TRL and
                 verl recompute "old" log-probs in the trainer at the start of a step (and can
                 multiply a truncated or masked old / mu on top); with one optimizer step per batch,
                 as here, their r is then always 1.
    std          Divided by n (the papers' formulas); TRL and verl divide by n - 1.
    masks        A rollout is averaged over all its tokens, those of weight 0 included, so masking
                 never makes the others louder; TRL and verl average over unmasked tokens.
    equal        Groups with equal rewards stay in for grpo, dr_grpo, rloo, reinforce, ppo and gspo:
    rewards      advantage 0, but part of the divisor, and their KL and entropy terms count. They
                 are dropped for dapo and cispo, as their papers do (dynamic sampling), and for
                 aipo, where no paper says so: a dropped group frees its slot for one that teaches.
                 TRL keeps them; verl drops them only with filter_groups.
"""

from __future__ import annotations

import math
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
from llamarl.config.algorithm import SurrogateConfig

MAX_LOG_RATIO = 20.0  # nats; e^20 is beyond every bound, and far from float32's largest number
K3_TANGENT_BELOW = -3.0  # nats


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
    """AIPO: truncated importance weights.

        formula   - sg(min(r, rho)) A log pi
        source    LlamaRL (arXiv 2505.24034), section 6; A = reward - group mean; rho 2 to 10
        TRL       has no such loss; nearest: cispo, which bounds r from above in the same way
        verl      bypass mode with REINFORCE and token weights truncated at 2 is the same formula
        here      mean over tokens (the paper does not say), rho 4

    The gradient is - min(r, rho) A grad log pi: a token above rho keeps the weight rho, where
    differentiating min(r, rho) A itself would give it none. rho bounds the weight for A < 0 too,
    so there is nothing left for a dual clip to do.
    """
    ratio = _ratio(log_ratio.detach())
    weight = ratio.clamp(max=config.rho)
    return -weight * inputs.advantages * inputs.trainer_logprobs, ratio > config.rho


def reinforce(
    inputs: LossInputs, log_ratio: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE and RLOO: the plain policy gradient, whatever wrote the token.

                  REINFORCE                      RLOO
        formula   - A log pi                     the same
        source    Williams 1992                  Ahmadian et al. (arXiv 2402.14740)
        A         reward - group mean            reward - mean of the group's others
        TRL       -                              PPO's clip on the ratio of whole rollouts, the KL
                                                 penalty inside the reward
        verl      bypass mode, unweighted        an estimator of A under PPO's clip
        here      mean over tokens               the same

    As in the papers there is no ratio, so stale tokens bias the gradient: use
    staleness.max_staleness=0, or a loss with a ratio.
    """
    clipped = torch.zeros_like(log_ratio, dtype=torch.bool)
    return -inputs.advantages * inputs.trainer_logprobs, clipped


def clip(inputs: LossInputs, log_ratio: Tensor, config: SurrogateConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, under PPO, GRPO, Dr. GRPO and DAPO.

        formula   L = - min(r A, clip(r, 1 - low, 1 + high) A)      and min(L, - c A) where A < 0

                  PPO           GRPO             Dr. GRPO             DAPO
        source    1707.06347    2402.03300       2503.20783           2503.14476
                  eq. 7         eq. 3, 4                              eq. 8
        A         reward-mean   (reward-mean)    reward-mean          (reward-mean)
                                / std                                 / std
        mean      tokens        rollouts         rollouts *           tokens
        over                                     max_tokens
        low, high 0.2, 0.2      0.2, 0.2         0.2, 0.2             0.2, 0.28
        KL        0             0.04 k3          0                    0
        TRL       critic, GAE   loss_type grpo,  dr_grpo and          dapo (the default), no drop
                                KL 0, std + 1e-4 scale_rewards none:  of equal groups, 0.28 if set
                                                 the same
        verl      critic, GAE   seq-mean-token-  seq-mean-token-sum-  token-mean, filter_groups,
                                mean, KL loss    norm: not divided    clip_ratio_high 0.28
                                0.001 if asked   by the rollouts

    PPO has no critic here: the group's mean is the value of every token. KL 0.04 is the paper's.
    c (clip_ratio_c 3, dual clip, arXiv 1912.09729) bounds what PPO leaves unbounded: with
    A < 0 and r large the first term has weight r. verl has it on at 3; TRL's `delta` clips r itself
    and is off. A token is clipped, and without gradient, where a constant term was chosen.
    """
    return _clipped_surrogate(log_ratio, inputs.advantages, config)


def cispo(inputs: LossInputs, log_ratio: Tensor, config: CISPOConfig) -> tuple[Tensor, Tensor]:
    """CISPO: clip the weight, keep every token's gradient.

    formula   - sg(clip(r, 1 - low, 1 + high)) A log pi
    source    MiniMax-M1 (arXiv 2506.13585), eq. 4, 5; A = (reward - mean) / std
    TRL       sg(min(r, epsilon_high)) with epsilon_high 5 advised: the bound itself
    verl      the same formula; low and high are 0.2 unless set
    here      low 1, which bounds nothing, as in the paper; high 4, the bound that ScaleRL
              (arXiv 2510.13786) advises: 5. M1 gives no number. Mean over the tokens of the
              step, where the paper averages over those of each group.
    """
    ratio = _ratio(log_ratio.detach())
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * inputs.advantages * inputs.trainer_logprobs, weight != ratio


def gspo(inputs: LossInputs, log_ratio: Tensor, config: GSPOConfig) -> tuple[Tensor, Tensor]:
    """GSPO: PPO's clip on one ratio per rollout.

        formula   s = exp(mean over the rollout's trained tokens of log r)
                  - min(s A, clip(s, 1 - low, 1 + high) A), dual clip as in `clip`
        source    arXiv 2507.18071, eq. 5 to 7; A = (reward - mean) / std, mean over rollouts
        TRL       importance_sampling_level sequence, 3e-4 and 4e-4 advised: the same formula
        verl      loss mode gspo: the same gradient; 3e-4 and 4e-4 in its examples; no dual clip
        here      low 0.015, high 0.02

    Every token of the rollout carries the rollout's term, so that normalization `rollouts` gives
    the paper's mean over rollouts.

    The paper's 3e-4 and 4e-4 fit a ratio of two passes of one trainer, which is exactly 1 before
    the first update. r here also holds the difference between two engines: if log r has deviation
    sigma per token, log s has sigma / sqrt(tokens) around - sigma^2 / 2 with nothing learnt yet.
    Share of rollouts so clipped before any update, in %:

        sigma 0.03, bounds         30 tokens    100    300   1000   10000
        3e-4, 4e-4                      47       46     42     37      35
        0.003, 0.004                    26       13      4      0       0
        0.015, 0.02                      0        0      0      0       0

    Measured: the quickstart with staleness.max_staleness=0 (15 tokens per rollout) clips 20 % of
    the first step's tokens under the paper's bounds and 2 % under these with a bfloat16 generator,
    44 % and 3 % with int8.

    Log-probs recomputed in the trainer would give s = 1 always, for there is one optimizer step per
    batch: no clip at all. So the bounds stand just above the noise instead; they catch a rollout
    whose tokens moved by 2 % on average. A run warns if its first step clips (`tally`).
    """
    zeros = torch.zeros_like(inputs.rollout_lengths, dtype=log_ratio.dtype)
    total = zeros.index_add(0, inputs.rollout_index, log_ratio)
    num_trained = zeros.index_add(0, inputs.rollout_index, inputs.weights.to(zeros.dtype))
    mean = total / num_trained.clamp(min=1)
    return _clipped_surrogate(mean[inputs.rollout_index], inputs.advantages, config)


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
        ratio = _ratio(log_ratio)
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
        k3          e^-d - 1 + d     1 - e^-d       below d = -3 the tangent at -3

    On tokens drawn from pi, d grad log pi is the true gradient of KL(pi || ref). k2 has it by
    plain differentiation; k1 does not (grad d averages to zero), so it is given the score-function
    form. k3 is differentiated as GRPO writes it: low variance and never negative, but its gradient
    is that of KL(ref || pi), equal to first order near the reference. No estimator is weighted by
    pi / mu: tokens a few versions old bias the penalty slightly, as in GRPO.

    Unbounded, k3 of one token with d = -20 is 4.9e8 and outweighs every other. Below -3, where ref
    is 20 times as likely as pi, it goes on along its tangent: at most 19 in the gradient, still
    convex, and always towards ref. verl clamps d to +-20 and the value to +-10, which is constant,
    hence without any pull, from d < -2.6 on: on just those tokens that went farthest. TRL bounds
    nothing.
    """
    if estimator == "k1":
        value = log_ref_ratio.detach()
        return value + value * (log_ref_ratio - value)
    if estimator == "k2":
        return log_ref_ratio.square() / 2
    d = log_ref_ratio.clamp(min=K3_TANGENT_BELOW)
    slope = 1 - math.exp(-K3_TANGENT_BELOW)
    return torch.exp(-d) - 1 + d + slope * (log_ref_ratio - d)


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


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, finite: an infinite ratio times the zero gradient of a clipped token would be NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, config: SurrogateConfig
) -> tuple[Tensor, Tensor]:
    ratio = _ratio(log_ratio)
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    gain = torch.minimum(free, bounded)
    floor = config.clip_ratio_c * advantages
    is_floored = (advantages < 0) & (gain < floor)
    return -torch.where(is_floored, floor, gain), (bounded < free) | is_floored
