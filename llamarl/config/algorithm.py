"""How rewards become a loss: one config class per algorithm.

Owns: the fields of `algorithm`. Does not own: the maths (`algorithms/`). Invariant: a field that
only one algorithm reads stands in that algorithm's class.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.check import check_fields, number, require_choice

ADVANTAGES = ("mean", "mean_std", "leave_one_out", "none")
NORMALIZATIONS = ("tokens", "rollouts", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Fields that every algorithm shares."""

    advantage: str = "mean"
    """Baseline: mean | mean_std (also divides by the group's deviation) | leave_one_out | none."""
    normalization: str = "tokens"
    """The step's summed loss is divided by: its response tokens | its rollouts, each rollout
    averaged over its own tokens first | rollouts * sampling.max_tokens (constant)."""
    kl_coefficient: float = number(0.0, least=0, most=1000)
    """Weight of the KL penalty to the reference model; 0 starts no reference executor."""
    kl_estimator: str = "k3"
    """Estimator of that penalty: k1 | k2 | k3 (Schulman's names)."""
    entropy_coefficient: float = number(0.0, least=-100, most=100)
    """Weight of an entropy bonus per response token."""
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal (their advantages are zero) and sample others in
    their place: DAPO's dynamic sampling, on for dapo, cispo and aipo. False counts them as trained:
    no gradient from the rewards, but KL and entropy terms, and their tokens in the divisor."""
    overlong_penalty_tokens: int = number(0, least=0, most=2**24)
    """DAPO's soft length penalty: the reward falls linearly to -1 over the last this many tokens
    before sampling.max_tokens; 0 switches it off."""
    mask_truncated: bool = False
    """Give rollouts cut at max_tokens zero loss weight (DAPO's overlong filtering)."""
    max_drops_in_row: int = number(2048, least=1, most=2**31)
    """Groups dropped one after another before the run stops and says why."""

    def __post_init__(self) -> None:
        check_fields("algorithm", self)
        require_choice("algorithm.advantage", self.advantage, ADVANTAGES)
        require_choice("algorithm.normalization", self.normalization, NORMALIZATIONS)
        require_choice("algorithm.kl_estimator", self.kl_estimator, KL_ESTIMATORS)


@dataclass(kw_only=True)
class AIPOConfig(AlgorithmConfig):
    """LlamaRL section 6: truncated importance weights, upper clip only."""

    drop_equal_rewards: bool = True
    rho: float = number(4.0, least=1, most=1e6)
    """Upper bound of pi/mu, at least 1; the paper advises 2 to 10."""


@dataclass(kw_only=True)
class ReinforceConfig(AlgorithmConfig):
    """Plain policy gradient: - A log pi, no importance weight."""


@dataclass(kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """REINFORCE with the leave-one-out baseline."""

    advantage: str = "leave_one_out"


@dataclass(kw_only=True)
class ClipConfig(AlgorithmConfig):
    """Fields of the losses that clip the ratio on both sides."""

    clip_low: float = number(0.2, above=0, most=1)
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = number(0.2, above=0, most=1e6)
    """The ratio's upper bound is 1 + clip_high; DAPO's clip-higher sets it above clip_low."""


@dataclass(kw_only=True)
class SurrogateConfig(ClipConfig):
    """Fields of the losses that differentiate the clipped ratio."""

    clip_ratio_c: float = number(3.0, above=1, most=1e9)
    """Dual clip: with a negative advantage a ratio above this counts as this and gives no gradient.
    Above 1; 1e9 switches it off, and a single token may then outweigh the batch."""


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
    drop_equal_rewards: bool = True
    clip_high: float = 0.28


@dataclass(kw_only=True)
class CISPOConfig(ClipConfig):
    """CISPO (MiniMax-M1): the clipped ratio is a detached weight of log pi."""

    advantage: str = "mean_std"
    drop_equal_rewards: bool = True
    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(kw_only=True)
class GSPOConfig(SurrogateConfig):
    """GSPO: one length-normalised ratio per rollout, clipped. The bounds are 50 times the paper's,
    which the noise between generator and trainer alone would exceed (algorithms/losses.py)."""

    advantage: str = "mean_std"
    normalization: str = "rollouts"
    clip_low: float = 0.015
    clip_high: float = 0.02
