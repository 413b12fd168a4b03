"""On-policy distillation: the reverse KL to a teacher, on the policy's own rollouts.

    formula   - sg(min(r, rho) (c_R A + c_T clip(log T - log pi, -g, g))) log pi
    source    On-Policy Distillation (Thinking Machines, 2025); GKD (arXiv 2306.13649) with lambda 1
              and the reverse KL; MiniLLM (arXiv 2306.08543), eq. 2
    T         the teacher's probability of the token that was drawn, in the reference's column
    TRL       GKDTrainer with lmbda 1, beta 1 takes the KL over the whole vocabulary, and
              differentiates no sampling; MiniLLMTrainer sums later tokens' gaps
    verl      none as a loss_mode
    here      c_T teacher_coefficient 1, c_R reward_coefficient 0, g MOST_GAP 5, rho 4, mean over
              tokens; algorithm.kl_coefficient adds its penalty to the teacher too

With tokens drawn from pi the mean of (log pi - log T) grad log pi is the gradient of KL(pi || T);
r = pi / mu corrects for rollouts of an earlier version, truncated as in AIPO. One token is all that
a teacher is asked about, so no vocabulary of log-probs is stored.
"""

from dataclasses import dataclass
from typing import ClassVar

from llamarl.core.config import AlgorithmConfig
from llamarl.core.fields import number
from llamarl.trainer.loss_inputs import LossInputs, LossTerms

MOST_GAP = 5.0
"""The most that log T - log pi of a token counts, in nats, with either sign: a single token that
the teacher finds impossible does not outweigh the others."""


@dataclass(kw_only=True)
class DistillConfig(AlgorithmConfig):
    """The policy becomes more like a teacher where it goes itself."""

    teacher: str = ""
    """Folder of the teacher's checkpoint, relative to the recipe's, or hf:ORG/NAME. It may be of
    any width; its tokenizer has the policy's tokens."""
    teacher_coefficient: float = number(1.0, above=0, most=1000)
    """Weight of the teacher: of log T - log pi beside the advantage."""
    reward_coefficient: float = number(0.0, least=0, most=1000)
    """Weight of the reward's advantage; 0: rewards are only measured."""
    rho: float = number(4.0, least=1, most=1e6)
    """Upper bound of pi/mu as a weight, at least 1; the papers advise 2 to 10 for aipo, and a large
    one for dppo."""

    scales_with_advantage: ClassVar[bool] = False

    def check(self) -> None:
        AlgorithmConfig.check(self)
        self.require(bool(self.teacher), "teacher", "name a checkpoint folder or hf:ORG/NAME")

    @property
    def has_reference(self) -> bool:
        return True

    @property
    def reference(self) -> str:
        return self.teacher


ALGORITHMS = {"distill": DistillConfig}


def loss(inputs: LossInputs, config: DistillConfig) -> LossTerms:
    """Return the loss and the tokens above rho, [N] each."""
    assert inputs.ref_logprobs is not None
    ratio = inputs.ratio.detach()
    gap = inputs.ref_logprobs - inputs.trainer_logprobs.detach()
    gap = gap.clamp(-MOST_GAP, MOST_GAP)
    gain = config.reward_coefficient * inputs.advantages + config.teacher_coefficient * gap
    weight = ratio.clamp(max=config.rho) * gain
    return -weight * inputs.trainer_logprobs, ratio > config.rho
