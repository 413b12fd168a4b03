"""The arguments and results of a loss. This module can be imported without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0  # nats; e^20 is beyond every bound, and far from float32's largest number


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The response tokens of whole rollouts, packed one after another (N tokens, R rollouts). Each
    conversation of an episode counts as one here.

    `weights` is 1 for a trained token and 0 for one that is only context (an observation, too
    stale, truncated); a token of weight 0 has no part in the loss, its gradient or the metrics.
    `rollout_lengths` counts the tokens that the model wrote, those of weight 0 included, and those
    of all conversations of an episode."""

    trainer_logprobs: Tensor  # float32 [N], log pi, with gradient
    generator_logprobs: Tensor  # float32 [N], log mu; 0 for an observation, which has none
    advantages: Tensor  # float32 [N]
    weights: Tensor  # float32 [N], 0 or 1
    entropy: Tensor  # float32 [N], nats; with gradient if there is an entropy bonus
    rollout_index: Tensor  # int64 [N], which rollout (0..R-1) a token belongs to
    rollout_lengths: Tensor  # int64 [R]
    ref_logprobs: Tensor | None = None  # float32 [N]
    proximal_logprobs: Tensor | None = None  # float32 [N], without gradient; None: those of mu
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # algorithm.loss_columns, each [N]

    @property
    def centre_logprobs(self) -> Tensor:
        """The log-probs that ratios are taken to: those of mu, or the proximal ones; float32
        [N]."""
        centre = self.proximal_logprobs
        return self.generator_logprobs if centre is None else centre

    @property
    def log_ratio(self) -> Tensor:
        """The log of `ratio`, float32 [N] with gradient; 0 where the weight is 0."""
        return self._log_ratio(self.centre_logprobs)

    @property
    def ratio(self) -> Tensor:
        """The ratio pi / mu, or pi / prox with proximal log-probs; float32 [N] with gradient,
        always finite."""
        return bounded_ratio(self.log_ratio)

    @property
    def num_trained(self) -> Tensor:
        """The number of trained tokens of each rollout, at least 1, float32 [R]."""
        return self.rollout_sums(self.weights.to(self.log_ratio.dtype)).clamp(min=1)

    def rollout_sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over the tokens of each rollout, [R]."""
        zeros = values.new_zeros(len(self.rollout_lengths))
        return zeros.index_add(0, self.rollout_index, values)

    @property
    def log_mu_ratio(self) -> Tensor:
        """The log of pi / mu, whatever the proximal log-probs are; 0 where the weight is 0."""
        return self._log_ratio(self.generator_logprobs)

    def _log_ratio(self, centre: Tensor) -> Tensor:
        # It is masked before exp, as an overflow on a token of weight 0 would give 0 * inf = NaN.
        return (self.trainer_logprobs - centre).masked_fill(self.weights <= 0, 0.0)


LossTerms: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""The loss of each token [N], with gradient; and if it clips, which tokens it clipped, [N] bool."""

TokenLoss = Callable[[LossInputs, Any], LossTerms]
"""A function (inputs, options of its algorithm) -> the loss terms."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp, but finite: an infinite ratio times the zero gradient of a clipped token is
    NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
