"""Episodes by the thousand whose tools are now and then very slow, on the virtual clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamarl.planner.simulation.clock import run
from tests.simulation.combinations import MANY_RESTARTS
from tests.simulation.faults import dying
from tests.simulation.loop import Loop
from tests.simulation.test_loop_search import check

ROLLOUTS = 4
TAIL = (0.0,) * 6 + (0.1, 0.5, 2.0, 40.0)  # seconds; a step takes about as long as the last


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_steps", "groups"), [(15, 15), pytest.param(50, 50, marks=pytest.mark.long)]
)
def test_many_episodes_keep_every_promise_amid_slow_tools_and_lost_processes(
    num_steps: int, groups: int, tmp_path: Path
) -> None:
    loop = Loop(
        max_staleness=2,
        num_steps=num_steps,
        groups_per_step=groups,
        rollouts_per_prompt=ROLLOUTS,
        num_replicas=4,
        max_restarts=MANY_RESTARTS,
        max_stage_restarts=MANY_RESTARTS,
        segment_tokens=7,
        most_turns=8,
        tool_seconds=TAIL,
        observation_tokens=5,
        faults=dying("generator-1", 50.0, 400.0) | dying("environment-0", 90.0, 500.0),
    )
    run(loop.run(tmp_path))
    check(loop)
    assert len(loop.trained_rows()) == num_steps * groups * ROLLOUTS
    ages = Counter(loop.staleness())
    assert ages[0], "some tokens are as new as their step's weights"
    assert ages[2], "others are as old as they may be"
    assert loop.trainer.version == num_steps
    for name in ("generator-1", "environment-0"):
        assert f"{name} 2" in loop.cluster.spawned, f"{name} must have been lost"
