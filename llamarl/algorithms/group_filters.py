"""The verdict on a scored group: its advantages, or why it is dropped. Invariant: pure and free of
torch, because the controller process runs it."""

from __future__ import annotations

from llamarl.algorithms.advantages import drop_reason, group_advantages, shaped_rewards
from llamarl.config import AlgorithmConfig
from llamarl.types import Group


def filter_group(group: Group, *, max_tokens: int, config: AlgorithmConfig) -> str | None:
    """Set `group.advantages` and return None, or return the reason to drop the group.

    `max_tokens` is the longest completion, which the overlong penalty counts back from.
    """
    scores = [group.scores[row_id] for row_id in group.row_ids]
    num_tokens = [group.rows[row_id].num_tokens for row_id in group.row_ids]
    rewards = shaped_rewards([score.reward for score in scores], num_tokens, max_tokens, config)
    reason = drop_reason(scores, rewards, config)
    if reason is None:
        group.advantages = group_advantages(rewards, config)
    return reason
