"""REINFORCE and RLOO: the plain policy gradient, for tokens of any version.

              REINFORCE                      RLOO
    formula   - A log pi                     the same
    source    Williams 1992                  Ahmadian et al. (arXiv 2402.14740)
    A         reward - group mean            reward - mean of the group's others
    TRL       -                              PPO's clip on the ratio of whole rollouts, the KL
                                             penalty inside the reward
    verl      bypass mode, unweighted        an estimator of A under PPO's clip
    here      mean over tokens               the same

As in the papers there is no ratio, so stale tokens bias the gradient: use
staleness.max_staleness=0, or a loss with a ratio.
"""

from dataclasses import dataclass

from llamarl.core.config import AlgorithmConfig
from llamarl.trainer.loss_inputs import LossInputs, LossTerms


@dataclass(kw_only=True)
class ReinforceConfig(AlgorithmConfig):
    """Plain policy gradient: - A log pi, no importance weight."""


@dataclass(kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """REINFORCE with the leave-one-out baseline."""

    advantage: str = "leave_one_out"


ALGORITHMS = {"reinforce": ReinforceConfig, "rloo": RLOOConfig}


def loss(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """Return the loss [N]; nothing is clipped."""
    return -inputs.advantages * inputs.trainer_logprobs
