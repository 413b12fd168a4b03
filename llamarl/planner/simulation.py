"""A run without a model: the real controller on a virtual clock, with executors that only sleep.

Owns: the assembly of a simulated run and what is read off it. Does not own: the loop (gate,
dispatch, packing, publisher and placement are those of a run, wired by `build.py`), durations
(`costs.py`) or lengths (`workload.py`). Invariant: deterministic; equal arguments give equal times.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.config import Config
from llamarl.models.architecture import Architecture
from llamarl.planner.costs import Costs
from llamarl.planner.forecast import StepForecast


def simulate(
    config: Config,
    architecture: Architecture,
    costs: Costs,
    *,
    lengths: Sequence[int] | None = None,
    equal_share: float = 0.0,
    num_steps: int | None = None,
) -> StepForecast:
    """The steady state of `num_steps` (default: plan.num_steps) steps of `config`.

    `lengths` (tokens of rollouts) and `equal_share` (of groups with equal rewards) default to what
    config.plan assumes. Evaluation, checkpoints and export are left out.
    """
    raise NotImplementedError
