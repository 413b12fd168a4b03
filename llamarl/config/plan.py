"""What a forecast assumes about the workload. Invariant: a run does not read it."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.check import require


@dataclass(kw_only=True)
class PlanConfig:
    """Lengths that `llamarl plan` reckons with: log-normal, cut at sampling.max_tokens."""

    prompt_tokens: int = 200
    """Tokens of a prompt."""
    median_tokens: int = 400
    """Tokens that half of the rollouts stay below."""
    spread: float = 0.8
    """Standard deviation of the logarithm of a rollout's length; 0 makes all equally long."""
    num_steps: int = 12
    """Steps simulated; the first ones, until the pipeline is full, are left out of the figures."""

    def __post_init__(self) -> None:
        require(self.prompt_tokens >= 1, "plan.prompt_tokens", "be at least 1", self.prompt_tokens)
        require(self.median_tokens >= 1, "plan.median_tokens", "be at least 1", self.median_tokens)
        is_finite = 0 <= self.spread < float("inf")
        require(is_finite, "plan.spread", "be at least 0 and finite", self.spread)
        require(self.num_steps >= 3, "plan.num_steps", "be at least 3", self.num_steps)
