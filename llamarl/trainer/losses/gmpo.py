"""GMPO: the geometric mean of the clipped ratios of a rollout.

    formula   m = exp(mean over the rollout's trained tokens of c),
              c = min(log r, high) where A > 0, max(log r, - low) where A < 0
              - m A, and at most - c_ratio A where A < 0 (dual clip as in `clip.py`)
    source    Geometric-Mean Policy Optimization (arXiv 2507.20673), eq. 4; A = (reward - mean) /
              std, mean over rollouts; low and high 0.4
    TRL       has no such loss; nearest: importance_sampling_level sequence, which clips the mean
    verl      loss_mode geo_mean: the same, without dual clip; low and high are 0.2 unless set
    here      low 0.4, high 0.4

The bounds are of log r, in nats, and of each token, where GSPO's are of the mean: a token beyond
them keeps its place in the mean, but has no gradient. They are 100 times what two engines differ by
(see `gspo.py`), so nothing is clipped before anything was learnt. Every token of the rollout
carries the rollout's term, so that normalization `rollouts` gives the mean over rollouts.
"""

from dataclasses import dataclass

from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms, bounded_ratio
from llamarl.trainer.losses.clip import DualClipConfig


@dataclass(kw_only=True)
class GMPOConfig(DualClipConfig):
    """GMPO: tokens are clipped, then their ratios have a geometric mean per rollout."""

    advantage: str = "mean_std"
    normalization: str = "rollouts"
    clip_log_low: float = number(0.4, above=0, most=20)
    """With a negative advantage the log of a token's ratio counts as -clip_log_low at least."""
    clip_log_high: float = number(0.4, above=0, most=20)
    """With a positive advantage the log of a token's ratio counts as clip_log_high at most."""


ALGORITHMS = {"gmpo": GMPOConfig}


def loss(inputs: LossInputs, config: GMPOConfig) -> LossTerms:
    """Return the loss, and the tokens that were clipped or whose rollout was, [N] each."""
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    low, high = -config.clip_log_low, config.clip_log_high
    above, below = (advantages > 0) & (log_ratio > high), (advantages < 0) & (log_ratio < low)
    clipped = log_ratio.masked_fill(above, high).masked_fill(below, low)
    mean = inputs.rollout_sums(clipped) / inputs.num_trained
    ratio = bounded_ratio(mean)[inputs.rollout_index]
    is_floored = (advantages < 0) & (ratio > config.clip_ratio_c)
    ratio = ratio.masked_fill(is_floored, config.clip_ratio_c)
    return -ratio * advantages, above | below | is_floored
