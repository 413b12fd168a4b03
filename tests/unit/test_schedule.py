"""The learning rate by hand."""

import pytest

from llamarl.algorithms.schedule import learning_rate
from llamarl.config import TrainerConfig


def rates(num_steps, **fields):
    config = TrainerConfig(lr=8.0, **fields)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_grows_to_the_peak_and_constant_stays_there():
    assert rates(6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_linear_falls_to_its_share_at_the_last_step():
    assert rates(5, schedule="linear", min_lr_share=0.5) == [8, 7, 6, 5, 4]
    assert rates(7, warmup_steps=2, schedule="linear") == [4, 8, 8, 6, 4, 2, 0]


def test_cosine_is_half_way_in_the_middle_and_flat_after_the_end():
    values = rates(5, schedule="cosine")
    assert values == pytest.approx([8, 8 * (1 + 0.5**0.5) / 2, 4, 8 * (1 - 0.5**0.5) / 2, 0])
    config = TrainerConfig(lr=8.0, schedule="cosine", min_lr_share=0.25)
    assert learning_rate(config, 9, 5) == 2


def test_one_step_runs_at_the_peak():
    assert rates(1, schedule="cosine") == [8]
