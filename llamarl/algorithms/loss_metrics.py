"""The metrics of a step's loss: sums over micro-batches, then over ranks.

Owns: which quantities are summed and the means made of them. Does not own: the collective.
Invariant: ranks exchange only sums and one maximum, so the result does not depend on how rows were
packed.
"""

import math
from collections.abc import Sequence

import torch

from llamarl.algorithms.policy_loss import LossOutputs

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
        """The first loss of a micro-batch that is not finite, and the rows of that; None if all
        are. Waits for the device."""
        losses = torch.stack(self._parts)[:, 0].tolist() if self._parts else []
        pairs = zip(losses, self._row_ids, strict=True)
        return next((pair for pair in pairs if not math.isfinite(pair[0])), None)

    def vector(self) -> torch.Tensor:
        """float64 [10] on the CPU: summed loss, the sums, response tokens, largest ratio."""
        if not self._parts:
            return torch.zeros(len(_SUMS) + 3, dtype=torch.float64)
        largest = torch.stack(self._maxima).max().double().reshape(1)
        return torch.cat([torch.stack(self._parts).sum(0), largest]).cpu()


def statistics(vectors: torch.Tensor, denominator: float) -> dict[str, float]:
    """Scalars of a step from the `vector` of every rank, float64 [ranks, 10].

    `loss` is the summed loss over `denominator`. ratio, kl (generator to trainer) and entropy are
    means over trained tokens, `masked_tokens` are those of weight 0 that a forward saw, and
    `drifted_tokens` those of them that `algorithm.mask_rollouts` masked.
    """
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
    """A warning if the first step clips or masks, although its rollouts come from the weights it
    trains.

    Before the first update every ratio should be 1, so what is clipped, or in rollouts that
    `algorithm.mask_rollouts` masked, is the numerical difference between generator and trainer.
    """
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
    """A warning if no token of the step was trained, so that it changed nothing: why, and what to
    change; the same words for every step of which the same is true."""
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
