"""The rules by which a step may start on its first groups, and the count of dropped groups in a
row."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from llamarl.core.config.trainer import TrainerConfig
from llamarl.core.groups import Group
from llamarl.trainer.advantages import SOLVED


@dataclass
class DropStreak:
    """Counts the groups that were dropped in a row: at `most` the run must end, as solved or with
    an error."""

    most: int
    reasons: Counter[str] = field(default_factory=Counter)

    def find_solved(self, all_prompts: int) -> str:
        """Return which groups show that nothing is left to learn, "" while more may be learnt.

        They are as many solved groups in a row as there are prompts, and as may be open (some are
        older than others), which is `all_prompts`; or `most` drops in a row, most of them because
        the group is solved.
        """
        num_drops, num_solved = self.reasons.total(), self.reasons[SOLVED]
        if num_solved == num_drops >= min(all_prompts, self.most):
            return f"all of the last {num_drops} groups"
        if num_drops < self.most or 2 * num_solved <= num_drops:
            return ""
        others = "the others had equal rewards or failed ones"
        return f"{num_solved} of the last {num_drops} groups ({others})"

    def require_signal(self) -> None:
        """Raise RuntimeError, with the reasons of the drops, if there are `most` of them."""
        if (num_drops := self.reasons.total()) >= self.most:
            reasons = ", ".join(f"{n} x {why}" for why, n in self.reasons.most_common())
            raise RuntimeError(
                f"no trainable group among the last {num_drops} ({reasons}), and most of them "
                "not correct: the reward gives no signal on these prompts; check reward, "
                "prompts and checkpoint"
            )


OVERHEAD_SHARE = 0.1  # of a part's time, at most, that its size does not change
NUM_KEPT = 24  # newest parts that are compared
LEAST_APART = 1.25  # ratio of the sizes of two parts whose times are compared


@dataclass(kw_only=True)
class PartSize:
    """Knows the smallest part to train, as `trainer.parts` says; `dynamic` learns it from `timed`
    parts.

    Example: parts of 1,000 and 10,000 tokens that took 0.2 and 1.1 s give a = 0.1 s and b = 0.1 ms,
    so a part has at least 9,000 tokens.
    """

    config: TrainerConfig
    _parts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    _sizes: list[int] = field(default_factory=list)  # of the parts of the step under way
    _most: float = math.inf  # half of the step before
    _is_cold: bool = True

    def __post_init__(self) -> None:
        self._saturating = self.config.num_data_ranks * self.config.tokens_per_micro_batch

    @property
    def num_tokens(self) -> int:
        """The tokens of the smallest dynamic part; before two sizes are measured, one full
        micro-batch for every data rank."""
        return round(min(self._saturating, self._most))

    def least(self, missing: int) -> tuple[int, int]:
        """Return (groups, tokens) that must be ready for a part of a step that misses `missing`
        groups; if all missing groups are ready, that is always enough."""
        return (missing, 0) if self.config.parts == "batch" else (1, self.num_tokens)

    @contextmanager
    def timed(self, groups: Sequence[Group]) -> Iterator[None]:
        """Time the training of one part, which is the block, and learn from it."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        yield
        rows = (row for group in groups for row in group.sequences)
        num_tokens = sum(each.num_prompt_tokens + each.num_tokens for each in rows)
        self._sizes.append(num_tokens)
        if not self._is_cold:
            self.learn(num_tokens, loop.time() - start_s)
        self._is_cold = False

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Learn from a part of `num_tokens` tokens, prompts included, that took `seconds`."""
        self._parts.append((num_tokens, seconds))
        if line := fit_line(self._parts):
            start_s, token_s = line
            share = OVERHEAD_SHARE
            self._saturating = round(start_s / token_s * (1 - share) / share)

    def take_metrics(self) -> dict[str, float]:
        """End the step under way; return the number of its parts and the smallest part size by
        now."""
        sizes, self._sizes = self._sizes, []
        self._most = sum(sizes) / 2
        least = {"parts/least_tokens": float(self.num_tokens)}
        return {"parts/number": len(sizes)} | (least if self.config.parts == "dynamic" else {})


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return (a, b) of the line y = a + b x with a >= 0 and b > 0 that fits most `points` (x, y);
    None if no two lie far enough apart, or y does not grow with x."""
    pairs = [
        (abs(x - u), (y - v) / (x - u))
        for (x, y), (u, v) in combinations(points, 2)
        if max(x, u) >= LEAST_APART * min(x, u) and x != u
    ]
    if not pairs:
        return None
    weights, slopes = np.array(pairs).T
    order = np.argsort(slopes)
    sums = np.cumsum(weights[order])
    slope = float(slopes[order[np.searchsorted(sums, sums[-1] / 2)]])
    if slope <= 0:
        return None
    return max(0.0, float(np.median([y - slope * x for x, y in points]))), slope
