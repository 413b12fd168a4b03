"""The forecast of a run with several optimizer steps per batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.core.config import TrainerConfig
from llamarl.planner.forecast import StepForecast
from llamarl.planner.simulation.simulated_run import settling_steps, simulate
from llamarl.trainer.losses.clip import PPOConfig
from tests.unit.test_planner_step import (
    COSTS,
    GROUPS,
    LENGTH,
    PROMPT_TOKENS,
    ROLLOUTS,
    TINY,
    make_config,
)

FORWARD_SHARE = 0.3
FREE = {"write_s": 0.0, "check_s": 0.0, "message_s": 0.0, "forward_share": FORWARD_SHARE}
ROW_TOKENS = PROMPT_TOKENS + LENGTH - 1


def forecast(
    mini_batches: int, passes: int, *, decode_s: float, proximal: str = "none", more: int = 0
) -> StepForecast:
    trainer = TrainerConfig(
        groups_per_step=GROUPS, num_mini_batches=mini_batches, num_passes=passes, parts="batch"
    )
    config = make_config(
        max_staleness=mini_batches * passes - 1 + more,
        trainer=trainer,
        algorithm=PPOConfig(proximal=proximal),
    )
    return simulate(config, TINY, replace(COSTS, decode_step_s=decode_s, **FREE))


def test_where_generation_takes_the_time_a_second_pass_halves_a_step() -> None:
    once = forecast(1, 1, decode_s=0.5)
    twice = forecast(1, 2, decode_s=0.5)
    assert twice.step_s < 0.6 * once.step_s
    assert twice.max_staleness <= 1


def test_where_training_takes_the_time_looking_ahead_costs_a_forward_of_the_later_mini_batches():
    plain = forecast(3, 1, decode_s=1e-6, more=3)
    ahead = forecast(3, 1, decode_s=1e-6, more=3, proximal="recompute")
    between = forecast(3, 1, decode_s=1e-6, more=3, proximal="interpolate")
    forward_s = 2 * GROUPS * ROLLOUTS * ROW_TOKENS * COSTS.token_s * FORWARD_SHARE
    extra_s = 3 * (ahead.step_s - plain.step_s)  # of a batch
    assert forward_s > 0.01
    assert extra_s == pytest.approx(forward_s + COSTS.part_s, rel=0.1)
    assert between.step_s == pytest.approx(plain.step_s)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_the_forecast_is_of_whole_batches(shape: tuple[int, int]) -> None:
    mini_batches, passes = shape
    per_batch = mini_batches * passes
    trainer = TrainerConfig(num_mini_batches=mini_batches, num_passes=passes)
    for more in range(4):
        config = make_config(max_staleness=per_batch - 1 + more, trainer=trainer)
        for num_steps in range(max(3, per_batch + 1), 40):
            skipped = settling_steps(config, num_steps)
            assert 0 < skipped < num_steps
            assert (num_steps - skipped) % per_batch == 0
