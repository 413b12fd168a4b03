"""The argument of llamarl/planner/simulation/variants.py, with the hardware's own times per sample.

Samples are rollouts of 512 + 512 tokens of an 8B model on H100; eta(b, m) is what a group of m GPUs
takes for one of b samples that it works on together, by the costs that forecasts use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest

from llamarl.core.config import EmbeddedConfig, TrainerConfig
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_times, kv_bytes
from llamarl.planner.simulation.roofline import trainer_costs
from llamarl.planner.simulation.trainer_times import sizes
from tests.unit.test_planner_costs import LLAMA_8B, make_gpu_recipe

PROMPT, ANSWER = 512, 512
NUM_GPUS, NUM_SAMPLES = 64, 2048
DEGREES = (1, 2, 4, 8)
BATCHES = tuple(2**i for i in range(12))
WEIGHT_BYTES = 2.0 * sizes(LLAMA_8B).total
STATE_BYTES = 16.0 * sizes(LLAMA_8B).total
SAMPLE_BYTES = 34.0 * 4096 * 32 * (PROMPT + ANSWER)  # activations, nothing repeated
KV_BYTES = kv_bytes(make_gpu_recipe(), LLAMA_8B) * (PROMPT + ANSWER)


@lru_cache
def costs_of(degree: int) -> Costs:
    config = replace(
        make_gpu_recipe(),
        generator=EmbeddedConfig(device="cuda", num_ranks=degree),
        trainer=TrainerConfig(device="cuda", num_ranks=degree, tensor_parallel=degree),
    )
    trained = trainer_costs(config, LLAMA_8B)
    return Costs(**generator_times(config, LLAMA_8B), **trained)


@lru_cache
def eta_trained(batch: int, degree: int) -> float:
    costs = costs_of(degree)
    work_s = costs.arithmetic_s([PROMPT + ANSWER] * batch)
    return (costs.passes_s(work_s) + costs.optimizer_s * batch / NUM_SAMPLES) / batch


@lru_cache
def eta_generated(batch: int, degree: int) -> float:
    costs = costs_of(degree)
    return (
        costs.prefill_s([PROMPT] * batch) + costs.decode_s(batch, batch * PROMPT, ANSWER)
    ) / batch


@dataclass(frozen=True)
class Best:
    """The shortest step, and how many bytes its GPUs would have left."""

    step_s: float
    left: float = 0.0


def batches(degree: int) -> list[int]:
    """No group gets more samples than there are."""
    return [batch for batch in BATCHES if batch <= NUM_SAMPLES * degree / NUM_GPUS]


def synchronous(memory: float) -> Best:
    """One budget and one degree for both sides, which take turns."""
    found = [
        Best(
            NUM_SAMPLES * m / NUM_GPUS * (eta_trained(t, m) + eta_generated(g, m)),
            memory - (STATE_BYTES + SAMPLE_BYTES * t + WEIGHT_BYTES + KV_BYTES * g) / m,
        )
        for m in DEGREES
        for t in batches(m)
        for g in batches(m)
    ]
    return min((b for b in found if b.left >= 0), key=lambda b: b.step_s, default=Best(1e9))


def asynchronous(memory: float) -> tuple[float, float]:
    """(step at the best share, that share): each side with its own budget and degree."""
    a = min(
        m * eta_trained(t, m)
        for m in DEGREES
        for t in batches(m)
        if (STATE_BYTES + SAMPLE_BYTES * t) / m <= memory
    )
    c = min(
        m * eta_generated(g, m)
        for m in DEGREES
        for g in batches(m)
        if (WEIGHT_BYTES + KV_BYTES * g) / m <= memory
    )
    return NUM_SAMPLES / NUM_GPUS * (a + c), a / (a + c)


@pytest.mark.parametrize("gib", [24, 32, 40, 48, 64, 80, 120, 200, 400, 10_000])
def test_the_asynchronous_step_is_never_longer_and_shorter_wherever_the_budget_binds(
    gib: int,
) -> None:
    memory = gib * 2**30
    together, (apart_s, share) = synchronous(memory), asynchronous(memory)
    assert 0 < share < 1
    assert apart_s <= together.step_s * (1 + 1e-9)
    if together.step_s > synchronous(1e15).step_s * (1 + 1e-9):  # a smaller budget than it wants
        assert apart_s < together.step_s


def test_both_sides_end_at_once_at_the_best_share_and_any_other_is_longer() -> None:
    memory = 80 * 2**30
    step_s, share = asynchronous(memory)
    a = share * step_s * NUM_GPUS
    c = (1 - share) * step_s * NUM_GPUS
    for other in (0.5 * share, 0.9 * share, share, min(0.99, 1.1 * share)):
        longest_s = max(a / (other * NUM_GPUS), c / ((1 - other) * NUM_GPUS))
        assert longest_s >= step_s * (1 - 1e-9)
        assert (longest_s < step_s * (1 + 1e-9)) is (other == share)


def test_the_gain_is_largest_where_weights_fill_the_memory() -> None:
    gains = {
        gib: synchronous(gib * 2**30).step_s / asynchronous(gib * 2**30)[0] for gib in (32, 80, 400)
    }
    assert max(gains, key=lambda gib: gains[gib]) == 32, gains
