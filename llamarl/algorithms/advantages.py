"""From the rewards of a group to one advantage per rollout.

Owns: reward shaping and the baselines, which a recipe selects by their names in `ADVANTAGES`. Does
not own: which groups are trained on (`group_filters.py`). Invariant: pure and free of torch,
because the controller process runs it.
"""

import math
from collections.abc import Callable, Sequence

from llamarl.config import AlgorithmConfig

Advantages = Callable[[Sequence[float]], Sequence[float]]
"""The rewards of a group's rollouts, two or more of them and finite -> their advantages."""

WeightedRewards = Sequence[tuple[float, Sequence[float]]]
"""Several rewards of a group's rollouts: the weight of each, and what it gave them."""

STD_EPSILON = 1e-6  # in units of reward: bounds the advantages of nearly equal rewards


def overlong_penalty(num_tokens: int, max_tokens: int, penalty_tokens: int) -> float:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13), from 0 down to -1.

        0                                              if num_tokens <= max_tokens - penalty_tokens
        (max_tokens - penalty_tokens - num_tokens) / penalty_tokens            between the two
        -1                                             if num_tokens >= max_tokens

    `penalty_tokens` 0 switches it off.
    """
    if penalty_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - penalty_tokens)
    return -min(max(excess / penalty_tokens, 0.0), 1.0)


def overlong_penalties(
    num_tokens: Sequence[int], max_tokens: int, config: AlgorithmConfig
) -> list[float]:
    """What is added to each reward before advantages are computed.

    `num_tokens[i]` counts the response tokens of rollout i, observations among them, as the limit
    does.
    """
    most = config.overlong_penalty_tokens
    return [overlong_penalty(length, max_tokens, most) for length in num_tokens]


def mean(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r): LlamaRL section 6, Dr. GRPO, PPO here."""
    if len(set(rewards)) == 1:  # exactly 0 in spite of rounding
        return [0.0] * len(rewards)
    centre = math.fsum(rewards) / len(rewards)
    return [reward - centre for reward in rewards]


def mean_std(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + e): GRPO; std over n (not n - 1), e = 1e-6."""
    centred = mean(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return [c / (std + STD_EPSILON) for c in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r_j, j != i): RLOO."""
    # r_i - (n * mean - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
    return [c * len(rewards) / (len(rewards) - 1) for c in mean(rewards)]


def none(rewards: Sequence[float]) -> Sequence[float]:
    """A_i = r_i."""
    return rewards


def apart(rewards: WeightedRewards) -> list[float]:
    """A_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + e): GDPO (arXiv 2601.05242), eq. 4, 5.

    Summed first, rewards (1, 0) and (0, 1) are equal, and what varies most hides the others.
    """
    weighted = [(weight, mean_std(values)) for weight, values in rewards]
    return [
        math.fsum(weight * values[i] for weight, values in weighted)
        for i in range(len(rewards[0][1]))
    ]


def over_deviation(advantages: Sequence[float]) -> list[float]:
    """A_i / (std(A) + e) over a batch of whole groups, so that their size does not grow with the
    number of rewards: GDPO, eq. 6. Its mean is 0, because that of each group is."""
    std = math.sqrt(math.fsum(a * a for a in advantages) / max(1, len(advantages)))
    return [a / (std + STD_EPSILON) for a in advantages]


ADVANTAGES: dict[str, Advantages] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
    "none": none,
}
"""By their names in `algorithm.advantage`."""

GDPO = "gdpo"  # another name there: `apart` of each group, then `over_deviation` of the batch
