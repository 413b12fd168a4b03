"""GSPO: PPO's clip on one ratio per rollout.

    formula   s = exp(mean over the rollout's trained tokens of log r)
              - min(s A, clip(s, 1 - low, 1 + high) A), dual clip as in `clip.py`
    source    arXiv 2507.18071, eq. 5 to 7; A = (reward - mean) / std, mean over rollouts
    TRL       importance_sampling_level sequence, 3e-4 and 4e-4 advised: the same formula
    verl      loss mode gspo: the same gradient; 3e-4 and 4e-4 in its examples; no dual clip
    here      low 0.015, high 0.02

Every token of the rollout carries the rollout's term, so that normalization `rollouts` gives
the paper's mean over rollouts.

The paper's 3e-4 and 4e-4 fit a ratio of two passes of one trainer, which is exactly 1 before
the first update. r here also holds the difference between two engines: if log r has deviation
sigma per token, log s has sigma / sqrt(tokens) around - sigma^2 / 2 with nothing learnt yet.
Share of rollouts so clipped before any update, in %:

    sigma 0.03, bounds         30 tokens    100    300   1000   10000
    3e-4, 4e-4                      47       46     42     37      35
    0.003, 0.004                    26       13      4      0       0
    0.015, 0.02                      0        0      0      0       0

Measured: the quickstart with staleness.max_staleness=0 (15 tokens per rollout) clips 20 % of
the first step's tokens under the paper's bounds and 2 % under these with a bfloat16 generator,
44 % and 3 % with int8.

With algorithm.proximal=recompute s holds no such noise: it is 1 in the first step of a batch, and
the paper's bounds fit the others. Without, the bounds are just above the noise; they clip a rollout
whose tokens moved by 2 % on average. A run warns if its first step clips
(`trainer/policy_loss.py`).
"""

from dataclasses import dataclass

from llamarl.trainer.loss_inputs import LossInputs, LossTerms
from llamarl.trainer.losses.clip import SurrogateConfig, clipped_surrogate


@dataclass(kw_only=True)
class GSPOConfig(SurrogateConfig):
    """GSPO: one length-normalised ratio per rollout, clipped. The bounds are 50 times the paper's,
    which the noise between generator and trainer alone would exceed (trainer/losses/gspo.py)."""

    advantage: str = "mean_std"
    normalization: str = "rollouts"
    clip_low: float = 0.015
    clip_high: float = 0.02


ALGORITHMS = {"gspo": GSPOConfig}


def loss(inputs: LossInputs, config: GSPOConfig) -> LossTerms:
    """Return the loss and the tokens of clipped rollouts, [N] each."""
    mean = inputs.rollout_sums(inputs.log_ratio) / inputs.num_trained
    return clipped_surrogate(mean[inputs.rollout_index], inputs.advantages, config)
