"""From the rewards of a group to one advantage per rollout.

Owns: reward shaping, the rule that drops a group, the baselines. Does not own: losses, or who
counts drops. Invariant: pure and free of torch, because the controller process runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llamarl.config import AlgorithmConfig
from llamarl.types import Score

FAILED_REWARD = "failed_reward"
EQUAL_REWARDS = "equal_rewards"
SOLVED = "solved"
STD_EPSILON = 1e-6  # in units of reward: keeps nearly equal rewards from exploding


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


def shaped_rewards(
    rewards: Sequence[float], num_tokens: Sequence[int], max_tokens: int, config: AlgorithmConfig
) -> tuple[float, ...]:
    """The rewards that advantages are computed from: each plus its overlong penalty.

    `num_tokens[i]` counts the response tokens of rollout i.
    """
    return tuple(
        reward + overlong_penalty(length, max_tokens, config.overlong_penalty_tokens)
        for reward, length in zip(rewards, num_tokens, strict=True)
    )


def drop_reason(
    scores: Sequence[Score], rewards: Sequence[float], config: AlgorithmConfig
) -> str | None:
    """Why a group is not trained on, or None. `rewards` are the shaped ones.

    - "failed_reward": any of its scores failed and has no reward (`reward.on_failure: zero` gives
      it one). A baseline over the survivors would favour the rollouts that reward code happens to
      digest, so the whole group goes.
    - "equal_rewards": with `config.drop_equal_rewards`, all rewards are equal and every advantage
      is therefore 0. With `advantage: none` that means all rewards are 0.
    - "solved": the same, and every rollout has full marks (`Score.correct`): there is nothing left
      to learn from this prompt.
    """
    if any(map(math.isnan, rewards)):
        return FAILED_REWARD
    if config.drop_equal_rewards and len(set(rewards)) == 1:
        if any(group_advantages(rewards, config)):
            return None
        return SOLVED if all(score.correct for score in scores) else EQUAL_REWARDS
    return None


def group_advantages(rewards: Sequence[float], config: AlgorithmConfig) -> tuple[float, ...]:
    """One advantage per rollout of a group, by `config.advantage`.

        mean           A_i = r_i - mean(r)                    LlamaRL section 6, Dr. GRPO, PPO here
        mean_std       A_i = (r_i - mean(r)) / (std(r) + e)   GRPO; std over n (not n - 1), e = 1e-6
        leave_one_out  A_i = r_i - mean(r_j, j != i)          RLOO
        none           A_i = r_i

    Raises ValueError if a reward is not finite, or on leave_one_out with fewer than two rewards.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    num_rewards = len(rewards)
    if config.advantage == "none":
        return tuple(rewards)
    if config.advantage == "leave_one_out" and num_rewards < 2:
        raise ValueError(f"leave_one_out must have at least 2 rewards, got {num_rewards}")
    if len(set(rewards)) <= 1:  # exactly zero, which rounding in the mean would not give
        return (0.0,) * num_rewards
    mean = math.fsum(rewards) / num_rewards
    centred = tuple(reward - mean for reward in rewards)
    if config.advantage == "mean":
        return centred
    if config.advantage == "leave_one_out":
        # r_i - (n * mean - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
        return tuple(c * num_rewards / (num_rewards - 1) for c in centred)
    if config.advantage == "mean_std":
        std = math.sqrt(math.fsum(c * c for c in centred) / num_rewards)
        return tuple(c / (std + STD_EPSILON) for c in centred)
    raise ValueError(f"advantage must be a known baseline, got {config.advantage!r}")
