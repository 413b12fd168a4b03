"""The groups that were dropped one after another, and what they show.

Owns: when so many drops mean that nothing is left to learn, or that the reward gives no signal.
Does not own: why a group is dropped (`algorithms/group_filters.py`). Invariant: one group that is
kept begins the count again.
"""

from collections import Counter
from dataclasses import dataclass, field

from llamarl.algorithms.group_filters import SOLVED


@dataclass
class DropStreak:
    """At `most` drops in a row the run must end, one way or the other."""

    most: int
    _reasons: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str) -> None:
        """Another group was dropped."""
        self._reasons[reason] += 1

    def clear(self) -> None:
        """A group was kept."""
        self._reasons.clear()

    def find_solved(self, all_prompts: int) -> str:
        """Which groups show that nothing is left to learn, "" while more may be learnt.

        That is as many solved groups in a row as there are prompts, and as may be open (some are
        older than others), which is `all_prompts`; or `most` drops in a row, most of them for being
        solved.
        """
        num_drops, num_solved = self._reasons.total(), self._reasons[SOLVED]
        if num_solved == num_drops >= min(all_prompts, self.most):
            return f"all of the last {num_drops} groups"
        if num_drops < self.most or 2 * num_solved <= num_drops:
            return ""
        others = "the others had equal rewards or failed ones"
        return f"{num_solved} of the last {num_drops} groups ({others})"

    def require_signal(self) -> None:
        """RuntimeError at `most` drops, with their reasons."""
        if (num_drops := self._reasons.total()) >= self.most:
            reasons = ", ".join(f"{n} x {why}" for why, n in self._reasons.most_common())
            raise RuntimeError(
                f"no trainable group among the last {num_drops} ({reasons}), and most of them "
                "without full marks: the reward gives no signal on these prompts; check reward, "
                "prompts and checkpoint"
            )
