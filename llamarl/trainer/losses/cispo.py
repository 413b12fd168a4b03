"""CISPO: clip the weight, keep every token's gradient.

formula   - sg(clip(r, 1 - low, 1 + high)) A log pi
source    MiniMax-M1 (arXiv 2506.13585), eq. 4, 5; A = (reward - mean) / std
TRL       sg(min(r, epsilon_high)) with epsilon_high 5 advised: the bound itself
verl      the same formula; low and high are 0.2 unless set
here      low 1, which bounds nothing, as in the paper; high 4, the bound that ScaleRL
          (arXiv 2510.13786) advises: 5. M1 gives no number. Mean over the tokens of the
          step, where the paper averages over those of each group.
"""

from dataclasses import dataclass, field

from llamarl.trainer.loss_inputs import LossInputs, LossTerms
from llamarl.trainer.losses.clip import ClipConfig


@dataclass(kw_only=True)
class CISPOConfig(ClipConfig):
    """CISPO (MiniMax-M1): the clipped ratio is a detached weight of log pi."""

    advantage: str = "mean_std"
    filters: list[str] = field(default_factory=lambda: ["equal_rewards"])
    clip_low: float = 1.0
    clip_high: float = 4.0


ALGORITHMS = {"cispo": CISPOConfig}


def loss(inputs: LossInputs, config: CISPOConfig) -> LossTerms:
    """Return the loss and the tokens whose weight was clipped, [N] each."""
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * inputs.advantages * inputs.trainer_logprobs, weight != ratio
