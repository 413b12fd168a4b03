"""Whole rollouts that have drifted too far from the policy that wrote them get no weight.

Owns: how far a rollout has drifted, and which ones are masked. Does not own: tokens that are masked
by their version, or by a loss. Invariant: all trained tokens of a rollout are masked, or none.

    algorithm.mask_rollouts    of a rollout, over its trained tokens with r = pi / mu
    geometric_mean             exp(mean log r)          verl: seq_mean_k1, with bounds of mu / pi
    product                    exp(sum log r)           verl: seq_sum_k1; TRL: sequence_mask
    k3                         mean(r - 1 - log r)      verl: seq_mean_k3

It is masked below `mask_below` or above `mask_above`. A product has the right expectation but
leaves 1 with the length of the rollout; the means do not depend on it. With `mask_negative_only` it
is the mask of DeepSeek-V3.2 (arXiv 2512.02556, eq. 9; TRL: off_policy_mask_threshold): what is no
longer likely under pi says little about what pi should avoid.
"""

import math

from torch import Tensor

from llamarl.algorithms.loss_inputs import LossInputs, bounded_ratio
from llamarl.config import AlgorithmConfig


def unmasked(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """`inputs.weights`, with 0 for all tokens of rollouts that are masked; [N]."""
    kind = config.mask_rollouts
    if kind == "off":
        return inputs.weights
    log_ratio = inputs.log_mu_ratio.detach()
    if kind == "k3":
        found = inputs.rollout_sums(bounded_ratio(log_ratio) - 1 - log_ratio) / inputs.num_trained
        is_far = (found < config.mask_below) | (found > config.mask_above)
    else:  # in logs, for the product of many ratios is beyond float32
        found = inputs.rollout_sums(log_ratio)
        if kind == "geometric_mean":
            found = found / inputs.num_trained
        lowest = math.log(config.mask_below) if config.mask_below else -math.inf
        is_far = (found < lowest) | (found > math.log(config.mask_above))
    masked = is_far[inputs.rollout_index]
    if config.mask_negative_only:
        masked = masked & (inputs.advantages < 0)
    return inputs.weights.masked_fill(masked, 0)
