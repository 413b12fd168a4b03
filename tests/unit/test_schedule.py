"""The learning rate by hand."""

import pytest

from llamarl.core.config import TrainerConfig
from llamarl.trainer.schedule import learning_rate


def rates(num_steps, **fields):
    config = TrainerConfig(lr=8.0, **fields)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_grows_to_the_peak_and_constant_stays_there():
    assert rates(6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_a_share_of_warm_up_is_one_of_the_steps_of_the_run_rounded_up():
    assert rates(6, warmup_share=0.5) == rates(6, warmup_steps=3)
    assert rates(10, warmup_share=0.01, schedule="linear") == rates(
        10, warmup_steps=1, schedule="linear"
    )
    assert rates(4, warmup_share=1.0) == [2, 4, 6, 8]
    with pytest.raises(
        ValueError, match=r"warmup_share must be 0 with trainer\.warmup_steps.*0\.1"
    ):
        TrainerConfig(warmup_steps=3, warmup_share=0.1)


def test_linear_falls_by_equal_amounts_and_its_last_step_still_learns():
    assert rates(4, schedule="linear") == [8, 6, 4, 2]
    assert rates(4, schedule="linear", min_lr_share=0.5) == [8, 7, 6, 5]
    assert rates(6, warmup_steps=2, schedule="linear") == [4, 8, 8, 6, 4, 2]


def test_cosine_is_half_way_in_the_middle_and_its_last_step_still_learns():
    assert rates(4, schedule="cosine") == pytest.approx([8, 6.828427, 4, 1.171573])
    assert rates(2, schedule="cosine", min_lr_share=0.25) == pytest.approx([8, 5])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (1, 1), (2, 5), (3, 2), (200, 10)])
def test_no_step_of_any_run_has_learning_rate_zero(schedule, num_steps, warmup_steps):
    values = rates(num_steps, schedule=schedule, warmup_steps=warmup_steps)
    assert all(0 < value <= 8 for value in values)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_steps_after_the_planned_end_stay_at_the_floor(schedule):
    config = TrainerConfig(lr=8.0, schedule=schedule, min_lr_share=0.25)
    assert [learning_rate(config, step, 5) for step in (5, 9)] == [2, 2]


def test_one_step_runs_at_the_peak():
    assert rates(1, schedule="cosine") == [8]
