"""Reward functions and the pool that runs them. Invariant: a reward that fails is counted, never
turned into a number."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.config.check import require, require_choice

REWARDS = ("math", "exact", "format", "task")


@dataclass(kw_only=True)
class RewardConfig:
    """What is rewarded and how patiently."""

    functions: list[str] = field(default_factory=lambda: ["math"])
    """Reward functions: math | exact | format | task (the recipe's own task.py). The first one's
    full marks are what accuracy counts."""
    weights: list[float] = field(default_factory=lambda: [1.0])
    """One weight per function; the reward is the weighted sum."""
    answer_field: str = "answer"
    """Field of the data row that holds the expected answer."""
    pattern: str = r"(?s)^.*Answer: *(.+?)\s*$"
    """Regular expression searched in the completion: `exact` compares its group 1 with the
    answer, `format` gives 1 if it matches."""
    require_stop: bool = True
    """`exact` and `format` give 0 to a completion that did not end by itself."""
    num_workers: int = 1
    """Processes of the reward pool."""
    timeout_s: float = 10.0
    """A reward that runs longer is killed and counted as hung."""
    max_failure_rate: float = 0.1
    """The run stops when more than this share of the last 1000 rewards failed (after 50)."""

    def __post_init__(self) -> None:
        require(
            bool(self.functions), "reward.functions", "name at least one function", self.functions
        )
        for name in self.functions:
            require_choice("reward.functions", name, REWARDS)
        require(
            len(self.weights) == len(self.functions),
            "reward.weights",
            f"have one weight per function ({len(self.functions)})",
            self.weights,
        )
        require(self.num_workers >= 1, "reward.num_workers", "be at least 1", self.num_workers)
        require(self.timeout_s > 0, "reward.timeout_s", "be above 0", self.timeout_s)
        require(
            0 <= self.max_failure_rate <= 1,
            "reward.max_failure_rate",
            "be within 0 and 1",
            self.max_failure_rate,
        )
