"""The way from the rewards of a group to one advantage per rollout, or to the reason why the group
is dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from llamarl.core.config import AlgorithmConfig
from llamarl.core.config.inputs import ENVIRONMENT, LARGEST
from llamarl.core.errors import TaskError
from llamarl.core.extensions import FILE
from llamarl.core.fields import require_choice
from llamarl.core.groups import REASON, Dropped, Group, Kept, ScoredGroup, Verdict
from llamarl.core.records import REWARD, conversation_row

Advantages = Callable[[Sequence[float]], Sequence[float]]
"""A function from the rewards of a group's rollouts, two or more and finite, to their
advantages."""

WeightedRewards = Sequence[tuple[float, Sequence[float]]]
"""Several rewards of a group's rollouts: the weight of each, and its values by rollout."""

STD_EPSILON = 1e-6  # in units of reward: bounds the advantages of nearly equal rewards


def overlong_penalty(num_tokens: int, max_tokens: int, penalty_tokens: int) -> float:
    """Return DAPO's soft length penalty (arXiv 2503.14476, eq. 13), from 0 down to -1.

        0                                              if num_tokens <= max_tokens - penalty_tokens
        (max_tokens - penalty_tokens - num_tokens) / penalty_tokens            between the two
        -1                                             if num_tokens >= max_tokens

    `penalty_tokens` 0 switches it off."""
    if penalty_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - penalty_tokens)
    return -min(max(excess / penalty_tokens, 0.0), 1.0)


def mean(rewards: Sequence[float]) -> list[float]:
    """Return A_i = r_i - mean(r): LlamaRL section 6, Dr. GRPO, PPO here."""
    if len(set(rewards)) == 1:  # exactly 0 in spite of rounding
        return [0.0] * len(rewards)
    centre = math.fsum(rewards) / len(rewards)
    return [reward - centre for reward in rewards]


def mean_std(rewards: Sequence[float]) -> list[float]:
    """Return A_i = (r_i - mean(r)) / (std(r) + e): GRPO; std over n (not n - 1), e = 1e-6."""
    centred = mean(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / len(rewards))
    return [c / (std + STD_EPSILON) for c in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return A_i = r_i - mean(r_j, j != i): RLOO."""
    # r_i - (n * mean - r_i) / (n - 1) = (r_i - mean) * n / (n - 1)
    return [c * len(rewards) / (len(rewards) - 1) for c in mean(rewards)]


def none(rewards: Sequence[float]) -> Sequence[float]:
    """Return A_i = r_i."""
    return rewards


def apart(rewards: WeightedRewards) -> list[float]:
    """Return A_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + e): GDPO (arXiv 2601.05242), eq. 4,
    5.

    If they were summed first, rewards (1, 0) and (0, 1) would be equal, and the reward that varies
    most would hide the others."""
    weighted = [(weight, mean_std(values)) for weight, values in rewards]
    return [
        math.fsum(weight * values[i] for weight, values in weighted)
        for i in range(len(rewards[0][1]))
    ]


def over_deviation(advantages: Sequence[float]) -> list[float]:
    """Return A_i / (std(A) + e) over a batch of whole groups, so that advantages do not grow with
    the number of rewards: GDPO, eq. 6. Their mean is 0, because that of each group is."""
    std = math.sqrt(math.fsum(a * a for a in advantages) / max(1, len(advantages)))
    return [a / (std + STD_EPSILON) for a in advantages]


ADVANTAGES: dict[str, Advantages] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
    "none": none,
}
"""Advantages by their names in `algorithm.advantage`."""

GDPO = "gdpo"  # another name there: `apart` of each group, then `over_deviation` of the batch


FAILED_REWARD = "failed_reward"
EQUAL_REWARDS = "equal_rewards"
SOLVED = "solved"
TASK = "task"  # the recipe's own task.py
LEAST_ROLLOUTS = {"none": 1, TASK: 1}  # by advantage; a rollout is no baseline of its own
EMPTY: Mapping[str, Callable[..., Any]] = MappingProxyType({})

GroupFilter = Callable[[ScoredGroup], str | None]
"""A function from a scored group to the reason to drop it, or None."""


def equal_rewards(group: ScoredGroup) -> str | None:
    """Return the reason to drop a group whose rewards are all equal and whose advantages are
    therefore all 0; it is "solved" if every rollout is correct (`StageResult.correct`).

    With `advantage: none` that means all rewards are 0."""
    if len(set(group.rewards)) > 1 or any(group.advantages):
        return None
    return SOLVED if all(score.correct for score in group.scores) else EQUAL_REWARDS


FILTERS: dict[str, GroupFilter] = {EQUAL_REWARDS: equal_rewards}
"""Filters by their names in `algorithm.filters`."""


def check_names(config: AlgorithmConfig) -> None:
    """Raise ValueError unless the advantage and the filters that the recipe selects exist."""
    require_choice("algorithm.advantage", config.advantage, [*ADVANTAGES, GDPO, TASK])
    for name in config.filters:
        require_choice("algorithm.filters", name, [*FILTERS, TASK])


def filter_group(
    group: Group,
    *,
    max_tokens: int,
    config: AlgorithmConfig,
    functions: Sequence[tuple[str, float]] = (),
    task: Mapping[str, Callable[..., Any]] = EMPTY,
) -> Verdict:
    """Return the group's advantages, or why it is dropped: the first reason of `config.filters`,
    which see rewards before the overlong penalty, as DAPO's (eq. 11) counts correct rollouts.

    Rollouts that a stage of the recipe's own dropped are left out; if too few are left for a
    baseline, their most frequent reason is the group's. Next comes "failed_reward": a score without
    reward (`reward.on_failure: zero` gives it one), or a sum beyond `LARGEST`. A baseline over the
    other rollouts would favour those that reward code happens to handle, so the whole group is
    dropped.

    A conversation of an episode that has a reward of its own gets the advantage that the episode
    would have with this reward in place of what its environment gives.

    `max_tokens` is the longest completion, which the overlong penalty counts back from; `functions`
    are the reward functions with their weights; `task` are the functions of task.py that the recipe
    names. Raises TaskError if one of them fails or returns an invalid value."""
    row_ids = [row_id for row_id in group.row_ids if row_id not in group.dropped]
    if len(row_ids) < min(len(group.row_ids), LEAST_ROLLOUTS.get(config.advantage, 2)):
        return Dropped(Counter(group.dropped.values()).most_common(1)[0][0])
    rollouts = tuple(group.rollouts[row_id] for row_id in row_ids)
    summed = _summed(group, row_ids, config)
    if not all(abs(reward) <= LARGEST for reward in summed):  # NaN: none was given
        return Dropped(FAILED_REWARD)

    def advantages(group: Group, penalties: Sequence[float]) -> tuple[float, ...]:
        if config.advantage == GDPO:
            columns = _weighted_rewards(group, row_ids, config, functions)
            return tuple(apart([*columns, (1.0, penalties)]))
        pairs = zip(_summed(group, row_ids, config), penalties, strict=True)
        return _advantages(tuple(reward + penalty for reward, penalty in pairs), config, task)

    scored = ScoredGroup(
        prompt=group.prompt,
        rollouts=rollouts,
        scores=tuple(group.scores[row_id] for row_id in row_ids),
        rewards=tuple(summed),
        advantages=advantages(group, [0.0] * len(summed)),
    )
    own = {
        conversation_row(row_id, number): (place, _with_reward(group, row_id, reward, functions))
        for place, (row_id, rollout) in enumerate(zip(row_ids, rollouts, strict=True))
        if rollout.episode is not None
        for number, reward in enumerate(rollout.episode.own_rewards)
        if reward is not None
    }
    for name in config.filters:
        if name == EQUAL_REWARDS and own:
            continue  # those of their conversations may differ
        reason = _drop_by_task(scored, task) if name == TASK else FILTERS[name](scored)
        if reason is not None:
            return Dropped(reason)
    most = config.overlong_penalty_tokens
    # Observations use the limit up too.
    lengths = [max(row.num_tokens for row in rollout.sequences) for rollout in rollouts]
    penalties = [overlong_penalty(length, max_tokens, most) for length in lengths]
    found = {row: advantages(other, penalties)[place] for row, (place, other) in own.items()}
    return Kept(advantages(group, penalties) if most else scored.advantages, found)


def _with_reward(
    group: Group, row_id: int, reward: float, functions: Sequence[tuple[str, float]]
) -> Group:
    """Return the group as if the environment had given this reward to the rollout."""
    score, episode = group.scores[row_id], group.rollouts[row_id].episode
    assert episode is not None
    weight = sum(share for name, share in functions if name == ENVIRONMENT)
    more = weight * (reward - (episode.reward or 0.0))
    parts = score.parts | ({ENVIRONMENT: reward} if ENVIRONMENT in score.parts else {})
    numbers = score.numbers | {REWARD: score.reward + more}
    replaced = replace(score, parts=parts, numbers=numbers)
    return replace(group, scores=group.scores | {row_id: replaced})


def _summed(group: Group, row_ids: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """Return the weighted sum of each rollout's rewards."""
    whole = _weighted_rewards(group, row_ids, config)
    return [sum([weight * values[i] for weight, values in whole]) for i in range(len(row_ids))]


def _weighted_rewards(
    group: Group,
    row_ids: Sequence[int],
    config: AlgorithmConfig,
    functions: Sequence[tuple[str, float]] = (),
) -> list[tuple[float, list[float]]]:
    """Return the reward columns that have a weight. In place of the column "reward" come the
    results of each of `functions`, if they are known; 0 for a rollout whose reward failed."""
    scores = [group.scores[i] for i in row_ids]
    are_known = any(name in score.parts for score in scores for name, _ in functions)
    found: list[tuple[float, list[float]]] = []
    for column, weight in zip(config.reward_columns, config.reward_column_weights, strict=True):
        if weight and column != REWARD:
            found.append((weight, [group.numbers[i][column] for i in row_ids]))
        elif weight and not are_known:
            found.append((weight, [score.reward for score in scores]))
        elif weight:
            for name, share in functions:
                found.append((weight * share, [score.parts.get(name, 0.0) for score in scores]))
    return found


def _advantages(
    rewards: Sequence[float], config: AlgorithmConfig, task: Mapping[str, Callable[..., Any]]
) -> tuple[float, ...]:
    if config.advantage != TASK:
        return tuple(ADVANTAGES[config.advantage](rewards))
    found = task["advantages"](rewards)
    is_sequence = isinstance(found, list | tuple) and len(found) == len(rewards)
    if not is_sequence or not all(isinstance(a, int | float) and math.isfinite(a) for a in found):
        must = f"be {len(rewards)} finite numbers, one per reward"
        raise TaskError(f"what advantages of {FILE} returns must {must}, got {found!r:.100}")
    return tuple(map(float, found))


def _drop_by_task(group: ScoredGroup, task: Mapping[str, Callable[..., Any]]) -> str | None:
    reason = task["drop"](group)
    if reason is None or (isinstance(reason, str) and REASON.fullmatch(reason)):
        return reason
    must = "be None or a reason of small letters, digits and _"
    raise TaskError(f"what drop of {FILE} returns must {must}, got {reason!r:.100}")
