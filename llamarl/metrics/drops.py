"""Dropped groups: how many, why, and when to warn.

Owns: counts by reason since the start, the groups dropped since the last step, the early warning.
Does not own: the filter (`algorithms/group_filters.py`), or ending a run whose groups are all
dropped (`gate.py`). Invariant: one warning per reason.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from llamarl.types import FinishReason, Group, StageStatus

log = logging.getLogger(__name__)

WINDOW_GROUPS = 64  # the latest groups, of which a warning gives the share dropped

MEANINGS = {
    "solved": "the rewards within such a group are all equal, and every rollout has full marks: "
    "the prompts are too easy, or reward.full_marks too low for the scale of the rewards",
    "equal_rewards": "the rewards within such a group are all equal, so they give no signal",
    "failed_reward": "reward code failed for a rollout of such a group",
}


class Drops:
    """Counts the groups of one run, dropped and kept."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.num_ready = 0
        """Groups worth training on that no step has taken yet."""
        self._rollouts: Counter[str] = Counter()
        self._current: dict[str, list[Group]] = defaultdict(list)
        self._window: deque[str | None] = deque(maxlen=WINDOW_GROUPS)  # None: not dropped
        self._latest: dict[str, Group] = {}
        self._warned: set[str] = set()

    @property
    def num_current(self) -> int:
        """Groups dropped since the last step."""
        return sum(map(len, self._current.values()))

    def add(self, group: Group, reason: str | None) -> None:
        """Count `group`, with the rollouts that stages dropped from it; `reason`: why it is dropped
        itself, None if it will be trained."""
        self._rollouts.update(group.dropped.values())
        self._window.append(reason)
        if reason is None:
            self.num_ready += 1
        else:
            self.total[reason] += 1
            self._current[reason].append(group)
            self._latest[reason] = group
            self._warn()

    def take(self, num_trained: int) -> dict[str, list[Group]]:
        """The groups dropped since the last call, by reason, at a step that trained `num_trained`.

        Includes every reason met since the start, so that its curve falls back to 0.
        """
        self.num_ready -= num_trained
        current, self._current = self._current, defaultdict(list)
        return {reason: current[reason] for reason in self.total}

    def take_rollouts(self) -> dict[str, int]:
        """The rollouts that stages dropped since the last call, by reason; every reason met since
        the start is there."""
        counts = dict(self._rollouts)
        self._rollouts = Counter(dict.fromkeys(counts, 0))
        return counts

    def _warn(self) -> None:
        """Warn, once per reason, when more than half of a window's groups were dropped."""
        counts = Counter(reason for reason in self._window if reason is not None)
        reason, count = counts.most_common(1)[0]
        if reason in self._warned or 2 * counts.total() <= WINDOW_GROUPS:
            return
        self._warned.add(reason)
        log.warning(
            "%d of the last %d groups were dropped, %d of them as %s: %s. They train "
            "nothing; algorithm.max_drops_in_row dropped groups in a row end the run.",
            counts.total(),
            len(self._window),
            count,
            reason,
            explain(reason, self._latest[reason]),
        )


def explain(reason: str, group: Group) -> str:
    """What `reason` means, with an example from `group`, which was dropped for it."""
    words = MEANINGS.get(reason, f"the group filter said {reason}")
    errors = [s.error for s in group.scores.values() if s.status is not StageStatus.OK]
    if errors:
        lines = errors[-1].strip().splitlines() or ["no message"]
        return f"{words} (the last error: {lines[-1]})"
    cut = [row.finish_reason is FinishReason.LENGTH for row in group.rollouts.values()]
    if 2 * sum(cut) > len(cut):
        words += f" ({sum(cut)} of the last one's {len(cut)} rollouts were cut at max_tokens)"
    return words


def in_words(counts: Mapping[str, int]) -> str:
    """{"solved": 160, "equal_rewards": 20} -> "180: 160 solved, 20 equal rewards"."""
    parts = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in parts]
    return f"{sum(counts.values()):,}: {', '.join(named)}"
