"""Supervised fine-tuning: the likelihood of demonstrations.

    formula   - log pi                         of what the assistant wrote
    TRL       SFTTrainer, loss_type nll: the same, mean over the trained tokens of a step
    verl      fsdp_sft_trainer: the same
    here      mean over tokens

Nothing is sampled, so mu, advantages and ratios have no part in it.
"""

from dataclasses import dataclass
from typing import ClassVar

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.loss_inputs import LossInputs, LossTerms


@dataclass(kw_only=True)
class SFTConfig(AlgorithmConfig):
    """What `llamarl sft` trains with; data.prompts are demonstrations."""

    advantage: str = "none"

    is_sft: ClassVar[bool] = True
    scales_with_advantage: ClassVar[bool] = False


ALGORITHMS = {"sft": SFTConfig}


def loss(inputs: LossInputs, config: SFTConfig) -> LossTerms:
    """Return the loss [N]; nothing is clipped."""
    return -inputs.trainer_logprobs
