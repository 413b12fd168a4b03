"""The faults that a rehearsal injects, by name, with the share of turns that each one meets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, field, fields

from llamarl.core.fields import require, require_choice

SLOW_S = 0.5  # that a slow call takes longer
MADE = "made to fail by the rehearsal"
"""What the error of an injected failure says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The share, from 0 to 1, of the turns that meet each fault: a call that takes SLOW_S longer
    (`slow`), a tool or another call of the environment that fails (`fail`), the loss of the
    environment's process (`kill`), of the connection to it (`drop`), or of the generator (`lose`),
    and a commit of new weights in the middle of the turn (`commit`)."""

    slow: float = 0.0
    fail: float = 0.0
    kill: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    commit: float = 0.0


USUAL = Faults(slow=0.1, fail=0.1, kill=0.02, drop=0.02, lose=0.02, commit=0.2)
WORDS = {
    "slow": "slow calls",
    "fail": "failing calls",
    "kill": "killed environment processes",
    "drop": "dropped connections",
    "lose": "lost generators",
    "commit": "commits in mid-episode",
}


def read_faults(text: str | None) -> Faults:
    """Return the faults of an argument such as `slow=0.1,kill=0.05`, or `none`. ValueError for
    anything else."""
    if text is None:
        return USUAL
    rates: dict[str, float] = {}
    for part in text.split(",") if text != "none" else ():
        name, _, rate = part.partition("=")
        require_choice("--faults", name.strip(), [each.name for each in fields(Faults)])
        try:
            rates[name.strip()] = float(rate)
        except ValueError:
            rates[name.strip()] = -1.0
        is_share = 0 <= rates[name.strip()] <= 1
        require(is_share, f"--faults {name.strip()}", "be a share from 0 to 1", rate)
    return Faults(**rates)


@dataclass(slots=True)
class Injector:
    """Decides which turns meet a fault, the same ones at each time: a fault happens to an episode
    at most `most` times. `counts` says how often each happened."""

    faults: Faults
    seed: int
    most: int = 2
    counts: Counter[str] = field(default_factory=Counter)
    _of_row: Counter[tuple[str, int]] = field(default_factory=Counter)

    def meets(self, name: str, row_id: int, attempt: int, place: object) -> bool:
        """Return whether the turn at this place in an attempt of a rollout meets the fault, and
        count it."""
        rate: float = asdict(self.faults)[name]
        if not rate or self._of_row[name, row_id] >= self.most:
            return False
        if random.Random(f"{self.seed} {name} {row_id} {attempt} {place}").random() >= rate:
            return False
        self._of_row[name, row_id] += 1
        self.counts[name] += 1
        return True
