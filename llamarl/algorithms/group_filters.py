"""The result for a scored group: its advantages, or why it is dropped.

Owns: that decision, and the filters, which a recipe selects by their names in `FILTERS`. Does not
own: baselines (`advantages.py`) or the counts of drops. Invariant: no argument is changed; free of
torch, because the controller process runs it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llamarl.algorithms.advantages import (
    ADVANTAGES,
    GDPO,
    apart,
    overlong_penalties,
)
from llamarl.config import AlgorithmConfig
from llamarl.config.check import require_choice
from llamarl.config.reward import LARGEST
from llamarl.errors import TaskError
from llamarl.groups import Dropped, Group, Kept, ScoredGroup, Verdict
from llamarl.task_file import FILE
from llamarl.types import REWARD

FAILED_REWARD = "failed_reward"
EQUAL_REWARDS = "equal_rewards"
SOLVED = "solved"
TASK = "task"  # the recipe's own task.py
REASON = re.compile("[a-z0-9_]{1,40}")  # it is part of a metric's name
LEAST_ROLLOUTS = {"none": 1, TASK: 1}  # by advantage; a rollout is no baseline of its own
EMPTY: Mapping[str, Callable[..., Any]] = MappingProxyType({})

GroupFilter = Callable[[ScoredGroup], str | None]
"""A scored group -> the reason to drop it, or None."""


def equal_rewards(group: ScoredGroup) -> str | None:
    """Drops a group whose rewards are all equal and whose advantages are therefore all 0; as
    "solved" if every rollout has full marks (`StageResult.correct`).

    With `advantage: none` that means all rewards are 0.
    """
    if len(set(group.rewards)) > 1 or any(group.advantages):
        return None
    return SOLVED if all(score.correct for score in group.scores) else EQUAL_REWARDS


FILTERS: dict[str, GroupFilter] = {EQUAL_REWARDS: equal_rewards}
"""By their names in `algorithm.filters`."""


def check_names(config: AlgorithmConfig) -> None:
    """ValueError unless the advantage and the filters that the recipe selects exist."""
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
    """The group's advantages, or why it is dropped: the first reason of `config.filters`, which see
    rewards before the overlong penalty, as DAPO's (eq. 11) counts correct rollouts.

    Rollouts that a stage of the recipe's own dropped are left out; if too few are left for a
    baseline, their most frequent reason is the group's. Next comes "failed_reward": a score without
    reward (`reward.on_failure: zero` gives it one), or a sum beyond `LARGEST`. A baseline over the
    other rollouts would favour those that reward code happens to handle, so the whole group is
    dropped.

    `max_tokens` is the longest completion, which the overlong penalty counts back from; `functions`
    are the reward functions with their weights; `task` are the functions of task.py that the recipe
    names. TaskError if one of them fails or returns an invalid value.
    """
    row_ids = [row_id for row_id in group.row_ids if row_id not in group.dropped]
    if len(row_ids) < min(len(group.row_ids), LEAST_ROLLOUTS.get(config.advantage, 2)):
        return Dropped(Counter(group.dropped.values()).most_common(1)[0][0])
    rollouts = tuple(group.rollouts[row_id] for row_id in row_ids)
    scores = tuple(group.scores[row_id] for row_id in row_ids)
    num_tokens = [rollout.num_tokens for rollout in rollouts]  # observations use the limit up too
    summed = _summed_rewards(group, row_ids, config)
    if not all(abs(reward) <= LARGEST for reward in summed):  # NaN: none was given
        return Dropped(FAILED_REWARD)
    columns = _weighted_rewards(group, row_ids, config, functions)

    def advantages(penalties: Sequence[float]) -> tuple[float, ...]:
        if config.advantage == GDPO:
            return tuple(apart([*columns, (1.0, penalties)]))
        rewards = tuple(reward + penalty for reward, penalty in zip(summed, penalties, strict=True))
        return _advantages(rewards, config.advantage, task)

    scored = ScoredGroup(
        prompt=group.prompt,
        rollouts=rollouts,
        scores=scores,
        rewards=tuple(summed),
        advantages=advantages([0.0] * len(summed)),
    )
    for name in config.filters:
        reason = _drop_by_task(scored, task) if name == TASK else FILTERS[name](scored)
        if reason is not None:
            return Dropped(reason)
    if not config.overlong_penalty_tokens:
        return Kept(scored.advantages)
    return Kept(advantages(overlong_penalties(num_tokens, max_tokens, config)))


def _summed_rewards(group: Group, row_ids: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """The weighted sum of each rollout's reward columns; NaN if its reward failed."""
    columns = _weighted_rewards(group, row_ids, config)
    return [sum([weight * values[i] for weight, values in columns]) for i in range(len(row_ids))]


def _weighted_rewards(
    group: Group,
    row_ids: Sequence[int],
    config: AlgorithmConfig,
    functions: Sequence[tuple[str, float]] = (),
) -> list[tuple[float, list[float]]]:
    """The reward columns with a weight, but for the column "reward" what each of `functions` gave,
    if it is known; 0 for a rollout whose reward failed."""
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
    rewards: Sequence[float], name: str, task: Mapping[str, Callable[..., Any]]
) -> tuple[float, ...]:
    if name != TASK:
        return tuple(ADVANTAGES[name](rewards))
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
