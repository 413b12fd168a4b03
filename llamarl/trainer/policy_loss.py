"""The loss of a step from the tokens of its micro-batches, and the metrics of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llamarl.core.config import AlgorithmConfig
from llamarl.core.errors import TaskError
from llamarl.trainer.loss_inputs import LossInputs, TokenLoss, bounded_ratio
from llamarl.trainer.losses import find_loss


def unmasked(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """Return `inputs.weights`, with 0 for all tokens of rollouts that are masked; [N]."""
    kind = config.mask_rollouts
    if kind == "off":
        return inputs.weights
    log_ratio = inputs.log_mu_ratio.detach()
    if kind == "k3":
        found = inputs.rollout_sums(bounded_ratio(log_ratio) - 1 - log_ratio) / inputs.num_trained
        is_far = (found < config.mask_below) | (found > config.mask_above)
    else:  # in logs, for the product of many ratios is beyond float32
        found = inputs.rollout_sums(log_ratio)
        if kind == "geometric_mean":
            found = found / inputs.num_trained
        lowest = math.log(config.mask_below) if config.mask_below else -math.inf
        is_far = (found < lowest) | (found > math.log(config.mask_above))
    masked = is_far[inputs.rollout_index]
    if config.mask_negative_only:
        masked = masked & (inputs.advantages < 0)
    return inputs.weights.masked_fill(masked, 0)


def share_of_way(versions: np.ndarray, first_version: int, version: int) -> np.ndarray:
    """Return where prox is taken to be between mu (0) and pi (1), float32 [N], for tokens written
    by `versions` [N], in a step at trainer version `version` of a batch that began at
    `first_version`.

        log prox = log mu + share * (log pi - log mu),  share = (first - w) / (version - w)

    for a token of version w: as if each optimizer step moved log-probs equally far (AReaL's
    "loglinear"). It is 1 in the first step of a batch, where prox is pi, and 0 for tokens written
    after that."""
    if first_version == version:
        return np.ones(len(versions), np.float32)
    num_before = np.maximum(first_version - versions, 0)
    return (num_before / np.maximum(version - versions, 1)).astype(np.float32)


def interpolated(generator_logprobs: Tensor, trainer_logprobs: Tensor, share: Tensor) -> Tensor:
    """Return log prox of each token by `share_of_way`, [N] without gradient."""
    return generator_logprobs.lerp(trainer_logprobs.detach(), share)


def age_weight(inputs: LossInputs, rho: float) -> Tensor:
    """Return min(prox / mu, rho) of each token, [N]; 1 where the weight is 0."""
    assert inputs.proximal_logprobs is not None
    log_weight = inputs.proximal_logprobs - inputs.generator_logprobs
    return bounded_ratio(log_weight.masked_fill(inputs.weights <= 0, 0.0)).clamp(max=rho)


ON_POLICY_CLIPPED_SHARE = 0.05  # of tokens; equal engines clip none before the first update
_SUMS = ("tokens", "ratio", "clipped", "kl", "entropy", "ref_kl", "drifted")


class LossMetrics:
    """One rank's part of the metrics of a step, kept on the device until the step ends."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._maxima: list[torch.Tensor] = []
        self._row_ids: list[Sequence[int]] = []

    def add(self, outputs: LossOutputs, num_tokens: int, row_ids: Sequence[int] = ()) -> None:
        """Count one micro-batch, of these rows, of `num_tokens` tokens that the model wrote, of any
        weight."""
        seen = torch.full_like(outputs.ratio_max, num_tokens)
        sums = [outputs.loss.detach(), *(outputs.sums[name] for name in _SUMS), seen]
        self._parts.append(torch.stack(sums).double())
        self._maxima.append(outputs.ratio_max)
        self._row_ids.append(row_ids)

    def broken(self) -> tuple[float, Sequence[int]] | None:
        """Return the first loss of a micro-batch that is not finite, and the rows of that
        micro-batch; None if all are finite. It waits for the device."""
        losses = torch.stack(self._parts)[:, 0].tolist() if self._parts else []
        pairs = zip(losses, self._row_ids, strict=True)
        return next((pair for pair in pairs if not math.isfinite(pair[0])), None)

    def vector(self) -> torch.Tensor:
        """Return float64 [10] on the CPU: summed loss, the sums, response tokens, largest ratio."""
        if not self._parts:
            return torch.zeros(len(_SUMS) + 3, dtype=torch.float64)
        largest = torch.stack(self._maxima).max().double().reshape(1)
        return torch.cat([torch.stack(self._parts).sum(0), largest]).cpu()


def statistics(vectors: torch.Tensor, denominator: float) -> dict[str, float]:
    """Return the scalars of a step from the `vector` of every rank, float64 [ranks, 10].

    `loss` is the summed loss over `denominator`. ratio, kl (generator to trainer) and entropy are
    means over trained tokens, `masked_tokens` are those of weight 0 that a forward saw, and
    `drifted_tokens` those of them that `algorithm.mask_rollouts` masked."""
    sums = vectors[:, :-1].sum(0).tolist()
    loss, tokens, ratio, clipped, kl, entropy, ref_kl, drifted, seen = sums
    trained = max(tokens, 1.0)
    return {
        "loss": loss / denominator,
        "trained_tokens": tokens,
        "masked_tokens": seen - tokens,
        "drifted_tokens": drifted,
        "ratio_mean": ratio / trained,
        "ratio_max": vectors[:, -1].max().item(),
        "ratio_clipped_share": clipped / trained,
        "kl": kl / trained,
        "entropy": entropy / trained,
        "ref_kl": ref_kl / trained,
    }


def on_policy_warning(scalars: dict[str, float]) -> str | None:
    """Return a warning if the first step clips or masks, although its rollouts come from the
    weights it trains.

    Before the first update every ratio should be 1, so a token that is clipped, or in a rollout
    that `algorithm.mask_rollouts` masked, shows the numerical difference between generator and
    trainer."""
    trained, drifted = scalars["trained_tokens"], scalars["drifted_tokens"]
    shares = {
        "clipped": scalars["ratio_clipped_share"],
        "masked": drifted / max(trained + drifted, 1.0),
    }
    word, share = max(shares.items(), key=lambda pair: pair[1])
    if share <= ON_POLICY_CLIPPED_SHARE:
        return None
    return (
        f"the first step {word} {share:.0%} of its tokens although generator and trainer had the "
        f"same weights (largest ratio {scalars['ratio_max']:.3g}): their log-probs differ by more "
        "than the bounds of the algorithm; widen those, or raise generator.dtype"
    )


def empty_step_warning(scalars: dict[str, float], masks_truncated: bool) -> str | None:
    """Return a warning if no token of the step was trained, so that it changed nothing: why, and
    what to change; the same words for every step of which the same is true."""
    if scalars["trained_tokens"]:
        return None
    if not scalars["masked_tokens"]:
        return "a step changed no weight: the advantages of all its rollouts are 0; check reward"
    truncated = (
        " or in rollouts cut at sampling.max_tokens (raise that, or set "
        "algorithm.mask_truncated=false)"
    )
    if scalars["drifted_tokens"] == scalars["masked_tokens"]:
        return (
            "a step changed no weight: all tokens that could be trained are of rollouts that "
            "algorithm.mask_rollouts masks: widen mask_below and mask_above, or lower trainer.lr "
            "or staleness.max_staleness"
        )
    return (
        "a step changed no weight: all tokens that could be trained are masked. They are older "
        "than staleness.max_staleness allows (raise it, take groups sooner with another "
        "experience.sampler, or set staleness.late=wait)"
        f"{truncated if masks_truncated else ''}"
    )


K3_TANGENT_BELOW = -3.0  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The loss of these tokens, not yet divided, and detached scalars to reduce over ranks.

    `sums` are to be summed over micro-batches and ranks: tokens (of weight 1), ratio, clipped
    (tokens whose ratio the algorithm clipped), kl (mu to pi, estimator k3), entropy, ref_kl, and
    drifted (tokens of rollouts that `algorithm.mask_rollouts` masked). `ratio_max` is a maximum, 0
    without trained tokens; `clipped` says which tokens were clipped, bool [N]; `weights` are those
    of the inputs, with 0 for masked tokens."""

    loss: Tensor
    sums: dict[str, Tensor]
    ratio_max: Tensor
    clipped: Tensor
    weights: Tensor


def policy_loss(
    inputs: LossInputs, config: AlgorithmConfig, token_loss: TokenLoss | None = None
) -> LossOutputs:
    """Return the summed loss of these tokens under `token_loss`, or the loss that `config` belongs
    to.

        sum_t w_t (algorithm's loss_t + kl_coefficient * kl_t - entropy_coefficient * entropy_t)

    w is 0 too for rollouts that `algorithm.mask_rollouts` masks; with proximal log-probs the
    algorithm's loss_t is weighted by `age_weight`. With normalization `rollouts` each rollout's
    sum is divided by its own length. Call backward on `loss`, sum gradients over all rows of the
    step, then divide once by `denominator`.

    Raises ValueError if there is a KL penalty but no `ref_logprobs`, TaskError for a loss of
    another shape."""
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
    """Return a per-token estimate of KL(pi || ref), from d = log pi - log ref [N] with gradient.

        estimator   value            gradient (times grad log pi)
        k1          d                d
        k2          d^2 / 2          d
        k3          e^-d - 1 + d     1 - e^-d       below d = -3 the tangent at -3

    On tokens drawn from pi, d grad log pi is the true gradient of KL(pi || ref). k2 has it by plain
    differentiation; k1 does not (grad d averages to zero), so it uses the score-function form. k3
    is differentiated as GRPO writes it: low variance and never negative, but its gradient is that
    of KL(ref || pi), equal to first order near the reference. No estimator is weighted by pi / mu:
    tokens a few versions old bias the penalty slightly, as in GRPO.

    Unbounded, k3 of one token with d = -20 is 4.9e8 and outweighs all others. Below -3, where ref
    is 20 times as likely as pi, it continues along its tangent: at most 19 in the gradient, still
    convex, and always towards ref. verl clamps d to +-20 and the value to +-10, which is constant,
    so without gradient, for d < -2.6: exactly on the tokens that are farthest from ref. TRL has no
    bound; by default it multiplies k3 by the ratio, which gives k2's gradient where that is 1."""
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
    """Return the number that the summed gradient of a whole step is divided by.

        tokens     num_tokens                     rollouts   num_rollouts
        constant   num_rollouts * max_tokens

    Both counts cover every rollout of the step and all tokens that models wrote, those with
    advantage 0 or weight 0 included: rollouts without a gradient may be left out of the forward
    pass, and masking a token never increases the weight of the others."""
    if config.normalization == "rollouts":
        return float(num_rollouts)
    if config.normalization == "constant":
        return float(num_rollouts * max_tokens)
    return float(num_tokens)


def is_inert(advantage: float, config: AlgorithmConfig) -> bool:
    """Return True if a rollout with this advantage has no gradient, so its forward may be
    skipped."""
    has_others = config.has_reference or config.entropy_coefficient != 0
    return advantage == 0 and config.scales_with_advantage and not has_others
