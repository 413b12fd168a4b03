"""The size of the smallest part that saturates the trainer, learnt from the times of parts."""

from __future__ import annotations

import asyncio
import random

import pytest

from llamarl.controller.batches import PartSize, fit_line
from llamarl.core.config import TrainerConfig
from llamarl.planner.simulation import clock
from tests.fakes import group_of, stopped

START_S, TOKEN_S = 0.1, 1e-4
WANTED = 9000  # tokens: then START_S is a tenth of the time


def make(**fields: object) -> PartSize:
    return PartSize(config=TrainerConfig(groups_per_step=64, **fields))  # type: ignore[arg-type]


def feed(size: PartSize, num_parts: int, late_share: float = 0.0, seed: int = 0) -> None:
    """Parts of 1,000 to 20,000 tokens, 5 % noise; some are held up for half a second."""
    rng = random.Random(seed)
    for _ in range(num_parts):
        num_tokens = rng.randint(1000, 20_000)
        seconds = (START_S + TOKEN_S * num_tokens) * rng.uniform(0.95, 1.05)
        size.learn(num_tokens, seconds + 0.5 * (rng.random() < late_share))


def test_before_a_measurement_a_part_fills_one_micro_batch_of_every_data_rank() -> None:
    size = make(num_ranks=8, tensor_parallel=2, tokens_per_micro_batch=500)
    assert size.least(64) == (1, 2000)


def test_two_exact_parts_give_the_size_at_which_a_tenth_of_the_time_is_overhead() -> None:
    size = make()
    size.learn(1000, START_S + TOKEN_S * 1000)
    size.learn(10_000, START_S + TOKEN_S * 10_000)
    assert size.least(64) == (1, WANTED)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_parts_that_are_held_up_move_the_size_little(seed: int) -> None:
    size = make()
    feed(size, 40, late_share=0.2, seed=seed)
    assert WANTED / 2 < size.num_tokens < WANTED * 2


def test_the_size_follows_a_trainer_whose_costs_change() -> None:
    size = make()
    feed(size, 40)
    for num_tokens in range(1000, 31_000, 1000):
        size.learn(num_tokens, START_S / 10 + TOKEN_S * num_tokens)
    assert size.num_tokens == pytest.approx(WANTED / 10, rel=0.01)


def test_parts_of_one_size_teach_nothing() -> None:
    size = make(tokens_per_micro_batch=500)
    for seconds in (1.0, 2.0, 3.0):
        size.learn(1000, seconds)
    assert size.least(64) == (1, 500)


def test_a_trainer_without_overhead_takes_a_group_at_a_time() -> None:
    size = make()
    for num_tokens in (1000, 2000, 3000):
        size.learn(num_tokens, TOKEN_S * num_tokens)
    assert size.least(64) == (1, 0)


def test_times_that_do_not_grow_with_size_leave_the_size_as_it_is() -> None:
    assert fit_line([(1000, 2.0), (2000, 1.0), (3000, 0.5)]) is None
    size = make(tokens_per_micro_batch=500)
    size.learn(1000, 1.0)
    size.learn(2000, 1.0)
    assert size.least(64) == (1, 500)


def test_a_part_is_at_most_half_a_step_so_that_sizes_differ_and_the_first_is_not_counted() -> None:
    async def train(size: PartSize, num_tokens: int, seconds: float) -> None:
        num_prompt = num_tokens // 4
        rollout = stopped(0, (0, num_tokens - num_prompt), num_prompt_tokens=num_prompt)
        with size.timed([group_of(0, rollouts={0: rollout})]):
            await asyncio.sleep(seconds)

    async def scenario() -> None:
        size = make(tokens_per_micro_batch=500)
        await train(size, 1000, 99.0)
        await train(size, 2000, 1.2)
        assert size.take_metrics() == {"parts/number": 2, "parts/least_tokens": 500}
        await train(size, 1000, 1.1)  # a = 1 s, b = 0.1 ms: 90,000 tokens would saturate it
        await train(size, 3000, 1.3)
        assert size.take_metrics() == {"parts/number": 2, "parts/least_tokens": 2000}

    clock.run(scenario())


def test_whole_batches_learn_nothing() -> None:
    batch = make(parts="batch")
    feed(batch, 10)
    assert [batch.least(missing) for missing in (64, 5)] == [(64, 0), (5, 0)]
