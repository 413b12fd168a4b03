"""AIPO: truncated importance weights.

    formula   - sg(min(r, rho)) A log pi
    source    LlamaRL (arXiv 2505.24034), section 6; A = reward - group mean; rho 2 to 10
    TRL       has no such loss; nearest: cispo, which bounds r from above in the same way
    verl      bypass mode with REINFORCE and token weights truncated at 2 is the same formula
    here      mean over tokens (the paper does not say), rho 4

The gradient is - min(r, rho) A grad log pi: a token above rho keeps the weight rho, where
differentiating min(r, rho) A itself would give it none. rho bounds the weight for A < 0 too,
so a dual clip would have no effect.
"""

from dataclasses import dataclass, field

from llamarl.core.config import AlgorithmConfig
from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms


@dataclass(kw_only=True)
class AIPOConfig(AlgorithmConfig):
    """LlamaRL section 6: truncated importance weights, upper clip only."""

    filters: list[str] = field(default_factory=lambda: ["equal_rewards"])
    rho: float = number(4.0, least=1, most=1e6)
    """Upper bound of pi/mu as a weight, at least 1; the papers advise 2 to 10 for aipo, and a large
    one for dppo."""


ALGORITHMS = {"aipo": AIPOConfig}


def loss(inputs: LossInputs, config: AIPOConfig) -> LossTerms:
    """Return the loss and the tokens above rho, [N] each."""
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(max=config.rho)
    return -weight * inputs.advantages * inputs.trainer_logprobs, ratio > config.rho
