"""From the tokens of a micro-batch to the loss of a step.

Owns: the KL and entropy terms, the sums reported with a loss and the number the step's gradient is
divided by. Does not own: the losses themselves (`losses/`), advantages, collectives, which tokens
are masked.
Invariant: a loss is a sum over tokens, so the gradient of a step is the same however it is cut into
micro-batches and ranks; `denominator` scales it once at the end.

Words: per token t of rollout i, pi is the trainer's probability, mu the generator's, ref the
reference's, ratio r = pi / mu, A the advantage, sg() is stop-gradient. Every log-prob is at the
sampling temperature.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.algorithms.loss_inputs import LossInputs, TokenLoss, bounded_ratio
from llamarl.algorithms.losses import find_loss
from llamarl.algorithms.proximal import age_weight
from llamarl.algorithms.rollout_mask import unmasked
from llamarl.config import AlgorithmConfig
from llamarl.errors import TaskError

K3_TANGENT_BELOW = -3.0  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The loss of these tokens, not yet divided, and detached scalars to reduce over ranks.

    `sums` are to be summed over micro-batches and ranks: tokens (of weight 1), ratio, clipped
    (tokens whose ratio the algorithm clipped), kl (mu to pi, estimator k3), entropy, ref_kl, and
    drifted (tokens of rollouts that `algorithm.mask_rollouts` masked). `ratio_max` is a maximum, 0
    without trained tokens; `clipped` says which tokens those are, bool [N]; `weights` are those of
    the inputs, without what was masked.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor
    clipped: Tensor
    weights: Tensor


def policy_loss(
    inputs: LossInputs, config: AlgorithmConfig, token_loss: TokenLoss | None = None
) -> LossOutputs:
    """The summed loss of these tokens under `token_loss`, or the loss that `config` belongs to.

        sum_t w_t (algorithm's loss_t + kl_coefficient * kl_t - entropy_coefficient * entropy_t)

    w is 0 too for rollouts that `algorithm.mask_rollouts` masks (`rollout_mask.py`); with proximal
    log-probs the algorithm's loss_t is weighted as `proximal.py` says. With
    normalization `rollouts` each rollout's sum is divided by its own length. Call backward on
    `loss`, sum gradients over all rows of the step, then divide once by `denominator`.

    Raises ValueError if there is a KL penalty but no `ref_logprobs`, TaskError for a loss of
    another shape.
    """
    if config.has_reference and inputs.ref_logprobs is None:
        raise ValueError("ref_logprobs must be given for algorithm.kl_coefficient > 0, got None")
    was_trained = inputs.weights > 0
    inputs = replace(inputs, weights=unmasked(inputs, config))
    trained, log_ratio = inputs.weights > 0, inputs.log_ratio
    terms = (token_loss or find_loss(config))(inputs, config)
    loss, clipped = terms if isinstance(terms, tuple) else (terms, torch.zeros_like(trained))
    for tensor in (loss, clipped):
        if not isinstance(tensor, Tensor) or tensor.shape != log_ratio.shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            must = f"loss must return one value per token, a tensor {tuple(log_ratio.shape)}"
            raise TaskError(f"{must}, got {got}")
    if inputs.proximal_logprobs is not None:
        loss = loss * age_weight(inputs, config.proximal_rho)
    ref_kl = torch.zeros_like(log_ratio)
    if inputs.ref_logprobs is not None:
        log_ref_ratio = torch.where(trained, inputs.trainer_logprobs - inputs.ref_logprobs, 0.0)
        ref_kl = kl_penalty(log_ref_ratio, config.kl_estimator)
    if config.has_reference:
        loss = loss + config.kl_coefficient * ref_kl
    if config.entropy_coefficient != 0:
        loss = loss - config.entropy_coefficient * inputs.entropy
    if config.normalization == "rollouts":
        loss = loss / inputs.rollout_lengths[inputs.rollout_index]
    with torch.no_grad():
        ratio, log_mu_ratio = inputs.ratio, inputs.log_mu_ratio
        values = {
            "tokens": torch.ones_like(ratio),
            "ratio": ratio,
            "clipped": clipped.to(ratio.dtype),
            "kl": bounded_ratio(log_mu_ratio) - 1 - log_mu_ratio,
            "entropy": inputs.entropy,
            "ref_kl": ref_kl,
        }
        sums = {name: torch.where(trained, value, 0.0).sum() for name, value in values.items()}
        sums["drifted"] = (was_trained & ~trained).to(ratio.dtype).sum()
        largest = torch.where(trained, ratio, 0.0)
        ratio_max = torch.cat([largest, ratio.new_zeros(1)]).max()
    total = torch.where(trained, loss, 0.0).sum()
    clipped = trained & (clipped.detach() > 0)
    return LossOutputs(
        loss=total, sums=sums, ratio_max=ratio_max, clipped=clipped, weights=inputs.weights
    )


def kl_penalty(log_ref_ratio: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref), from d = log pi - log ref [N] with gradient.

        estimator   value            gradient (times grad log pi)
        k1          d                d
        k2          d^2 / 2          d
        k3          e^-d - 1 + d     1 - e^-d       below d = -3 the tangent at -3

    On tokens drawn from pi, d grad log pi is the true gradient of KL(pi || ref). k2 has it by
    plain differentiation; k1 does not (grad d averages to zero), so it uses the score-function
    form. k3 is differentiated as GRPO writes it: low variance and never negative, but its gradient
    is that of KL(ref || pi), equal to first order near the reference. No estimator is weighted by
    pi / mu: tokens a few versions old bias the penalty slightly, as in GRPO.

    Unbounded, k3 of one token with d = -20 is 4.9e8 and outweighs all others. Below -3, where ref
    is 20 times as likely as pi, it continues along its tangent: at most 19 in the gradient, still
    convex, and always towards ref. verl clamps d to +-20 and the value to +-10, which is constant,
    so without gradient, for d < -2.6: exactly on the tokens that are farthest from ref. TRL has no
    bound; by default it multiplies k3 by the ratio, which gives k2's gradient where that is 1.
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

    Both counts cover every rollout of the step and all that models wrote, tokens with advantage 0
    or weight 0 included: rollouts without a gradient may be left out of the forward pass, and
    masking a token never increases the weight of the others.
    """
    if config.normalization == "rollouts":
        return float(num_rollouts)
    if config.normalization == "constant":
        return float(num_rollouts * max_tokens)
    return float(num_tokens)


def is_inert(advantage: float, config: AlgorithmConfig) -> bool:
    """True if a rollout with this advantage has no gradient, so its forward may be skipped."""
    has_others = config.has_reference or config.entropy_coefficient != 0
    return advantage == 0 and config.scales_with_advantage and not has_others
