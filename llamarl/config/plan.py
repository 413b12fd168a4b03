"""What a forecast assumes about the workload; a run does not read it."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.check import Section, number


@dataclass(kw_only=True)
class PlanConfig(Section):
    """Lengths that `llamarl plan` assumes: log-normal, cut at sampling.max_tokens."""

    key = "plan"

    prompt_tokens: int = number(200, least=1, most=2**24)
    """Tokens of a prompt."""
    median_tokens: int = number(400, least=1, most=2**24)
    """Tokens that half of the rollouts stay below."""
    spread: float = number(0.8, least=0, most=1e6)
    """Standard deviation of the logarithm of a rollout's length; 0 makes all equally long."""
    num_steps: int = number(12, least=3, most=10_000)
    """Steps simulated; the first ones, until the pipeline is full, are left out of the figures."""
