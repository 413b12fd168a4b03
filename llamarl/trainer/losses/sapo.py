"""SAPO: a soft gate instead of a clip.

    formula   - 4 / tau sigmoid(tau (r - 1)) A        tau = tau_positive if A > 0, else tau_negative
    source    Soft Adaptive Policy Optimization (arXiv 2511.20347), eq. 5, 6; A = (reward - mean) /
              std, mean over rollouts; tau 1 and 1.05
    TRL       loss_type sapo: the same
    verl      loss_mode sapo: the same, always averaged over rollouts
    here      the same

The gradient is that of r A, weighted with sech^2(tau (r - 1) / 2): 1 on-policy, falling smoothly on
both sides, and nearly 0 for r far above 1. So nothing is clipped, and no dual clip is needed.
"""

from dataclasses import dataclass

from llamarl.core.config import AlgorithmConfig
from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms


@dataclass(kw_only=True)
class SAPOConfig(AlgorithmConfig):
    """SAPO: every token's gradient fades smoothly as its ratio leaves 1."""

    advantage: str = "mean_std"
    normalization: str = "rollouts"
    tau_positive: float = number(1.0, above=0, most=1000)
    """How fast it fades for tokens with a positive advantage; larger is faster."""
    tau_negative: float = number(1.05, above=0, most=1000)
    """The same for the others; the paper sets it above `tau_positive`, because what makes a token
    less likely makes all others of the vocabulary likelier, and that is less stable."""


ALGORITHMS = {"sapo": SAPOConfig}


def loss(inputs: LossInputs, config: SAPOConfig) -> LossTerms:
    """Return the loss [N]; nothing is clipped."""
    is_positive = inputs.advantages > 0
    tau = inputs.advantages.new_full((), config.tau_negative)
    tau = tau.where(~is_positive, config.tau_positive)
    gate = (tau * (inputs.ratio - 1)).sigmoid() * 4 / tau
    return -gate * inputs.advantages
