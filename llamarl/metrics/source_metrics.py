"""Numbers of each source of prompts: of a step, and over a run.

Owns: their tags, which a source's name ends. Does not own: the names (`config/input_keys.py`).
Invariant: the sums over a run follow from the tags of its steps alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.groups import Group

GROUPS, DROPPED, REWARD, LENGTH = (
    f"source_{name}" for name in ("groups", "dropped_share", "reward", "length")
)
SOURCE_TAGS = tuple(f"{name}/" for name in (GROUPS, DROPPED, REWARD, LENGTH))  # their beginnings


def source_scalars(
    trained: Sequence[Group], finished: Sequence[Group], names: Sequence[str]
) -> dict[str, float]:
    """By tag, of all groups `finished` in a step, those `trained` and those dropped; a source
    without one is left out."""
    kept = {group.group_id for group in trained}
    scalars: dict[str, float] = {}
    for source, name in enumerate(names):
        groups = [group for group in finished if group.prompt.source == source]
        if not groups:
            continue
        scalars[f"{GROUPS}/{name}"] = len(groups)
        num_dropped = sum(group.group_id not in kept for group in groups)
        scalars[f"{DROPPED}/{name}"] = num_dropped / len(groups)
        scores = [score for group in groups for score in group.scores.values()]
        rewards = [score.reward for score in scores if score.has_reward]
        lengths = [row.num_generated for group in groups for row in group.rollouts.values()]
        for tag, values in ((REWARD, rewards), (LENGTH, lengths)):
            if values:
                scalars[f"{tag}/{name}"] = sum(values) / len(values)
    return scalars


def sum_sources(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By source, over the steps of a run: its groups, the share of them that was dropped, and the
    mean reward and length, each step weighted by the source's groups in it."""
    found: dict[str, dict[str, float]] = {}
    names = {tag.partition("/")[2] for step in steps for tag in step if tag.startswith(GROUPS)}
    for name in sorted(names):
        tag = f"{GROUPS}/{name}"
        counts = [(step, step[tag]) for step in steps if isinstance(step.get(tag), int | float)]
        sums = {"groups": float(sum(count for _, count in counts))}
        for tag in (DROPPED, REWARD, LENGTH):
            own = f"{tag}/{name}"
            pairs = [(s[own], n) for s, n in counts if isinstance(s.get(own), int | float)]
            total = sum(number for _, number in pairs)
            if total:
                mean = sum(value * number for value, number in pairs) / total
                sums[tag.removeprefix("source_")] = mean
        found[name] = sums
    return found
