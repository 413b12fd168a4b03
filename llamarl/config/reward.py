"""Reward functions and the pool that runs them. Invariant: a reward that fails is counted, and
becomes a number only where the recipe asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.config.check import DAY_S, check_fields, number, require, require_choice

ON_FAILURE = ("drop", "zero")


@dataclass(kw_only=True)
class RewardConfig:
    """What is rewarded and how patiently."""

    functions: list[str] = field(default_factory=lambda: ["math"])
    """Reward functions: math | exact | format | task (the recipe's own task.py). The first one's
    full marks are what accuracy counts."""
    weights: list[float] = field(
        default_factory=lambda: [1.0], metadata={"least": -1e6, "most": 1e6}
    )
    """One weight per function; the reward is the weighted sum."""
    answer_field: str = "answer"
    """Field of the data row that holds the expected answer."""
    pattern: str = r"(?s)^.*Answer: *(.+?)\s*$"
    """Regular expression searched in the completion: `exact` compares its group 1 with the
    answer, `format` gives 1 if it matches."""
    require_stop: bool = True
    """`exact` and `format` give 0 to a completion that did not end by itself."""
    num_workers: int = number(1, least=1, most=1024)
    """Processes of the reward pool."""
    timeout_s: float = number(10.0, above=0, most=DAY_S)
    """A reward that runs longer is killed and counted as hung."""
    on_failure: str = "drop"
    """What a rollout whose reward failed (raised, hung, no finite number) means to its group:
    drop (the group is not trained on: a baseline over the others would favour what reward code
    digests) | zero (its reward is 0, for rewards that fail on what is wrong, such as a verifier
    that runs out of time). Both are counted."""
    max_failure_rate: float = number(0.1, least=0, most=1)
    """The run stops when more than this share of the last 1000 rewards failed (after 50), whatever
    `on_failure` says; 1 never stops it."""

    def __post_init__(self) -> None:
        check_fields("reward", self)
        require(
            bool(self.functions), "reward.functions", "name at least one function", self.functions
        )
        require(
            len(self.weights) == len(self.functions),
            "reward.weights",
            f"have one weight per function ({len(self.functions)})",
            self.weights,
        )
        require_choice("reward.on_failure", self.on_failure, ON_FAILURE)
