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
                            mean, KL loss    norm: the same       clip_ratio_high 0.28
                            0.001 if asked

PPO has no critic here: the group's mean is the value of every token. KL 0.04 is the paper's.
c (clip_ratio_c 3, dual clip, arXiv 1912.09729) bounds what PPO leaves unbounded: with
A < 0 and r large the first term has weight r. verl has it on at 3; TRL's `delta` clips r itself
and is off. A token is clipped, and without gradient, where a constant term was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamarl.core.config import AlgorithmConfig
from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms, bounded_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class ClipConfig(AlgorithmConfig):
    """Fields of the losses that clip the ratio on both sides."""

    clip_low: float = number(0.2, above=0, most=1)
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = number(0.2, above=0, most=1e6)
    """The ratio's upper bound is 1 + clip_high; DAPO's clip-higher sets it above clip_low."""


@dataclass(kw_only=True)
class DualClipConfig(AlgorithmConfig):
    """The field of the losses that differentiate a ratio."""

    clip_ratio_c: float = number(3.0, above=1, most=1e9)
    """Dual clip: with a negative advantage a ratio above this counts as this and gives no gradient.
    Above 1; 1e9 switches it off, and a single token may then outweigh the batch."""


@dataclass(kw_only=True)
class SurrogateConfig(ClipConfig, DualClipConfig):
    """Fields of the losses that differentiate the clipped ratio."""


@dataclass(kw_only=True)
class PPOConfig(SurrogateConfig):
    """PPO-clip with the group's mean as baseline."""


@dataclass(kw_only=True)
class GRPOConfig(SurrogateConfig):
    """GRPO: PPO-clip, standardised group advantage, mean over rollouts, KL to a reference."""

    advantage: str = "mean_std"
    normalization: str = "rollouts"
    kl_coefficient: float = 0.04


@dataclass(kw_only=True)
class DrGRPOConfig(SurrogateConfig):
    """Dr. GRPO: no deviation, no per-rollout length division."""

    normalization: str = "constant"


@dataclass(kw_only=True)
class DAPOConfig(SurrogateConfig):
    """DAPO: clip-higher, token-level mean, dynamic sampling. Its soft length penalty is off until
    `overlong_penalty_tokens` is set, and its overlong filtering is `mask_truncated`."""

    advantage: str = "mean_std"
    filters: list[str] = field(default_factory=lambda: ["equal_rewards"])
    clip_high: float = 0.28


ALGORITHMS = {"ppo": PPOConfig, "grpo": GRPOConfig, "dr_grpo": DrGRPOConfig, "dapo": DAPOConfig}


def loss(inputs: LossInputs, config: SurrogateConfig) -> LossTerms:
    """Return the loss and the tokens that a constant term was chosen for, [N] each."""
    return clipped_surrogate(inputs.log_ratio, inputs.advantages, config)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, config: SurrogateConfig
) -> tuple[Tensor, Tensor]:
    """Return the table's L of each token, and where it is constant, from log r [N] and A [N]."""
    ratio = bounded_ratio(log_ratio)
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    gain = free.minimum(bounded)
    floor = config.clip_ratio_c * advantages
    is_floored = (advantages < 0) & (gain < floor)
    return -floor.where(is_floored, gain), (bounded < free) | is_floored
