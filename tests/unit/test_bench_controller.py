"""The controller's bench counts what a small run must have: nothing more, nothing less."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench_controller import results, simulate
from controller_bench.messages import MessageCosts
from controller_bench.simulation import Shape

COSTS = MessageCosts(call_s=1e-3, sent_byte_s=0.0, received_byte_s=0.0, ranks_s=1e-3, num_actors=0)
SHAPE = Shape(num_replicas=4, num_trainer_ranks=16, num_groups=16, num_steps=5)


@pytest.mark.parametrize(("num_collectors", "who"), [(0, "generator"), (2, "collector")])
def test_a_small_run_has_the_calls_that_its_shape_demands_and_pays_for_each(
    num_collectors: int, who: str
) -> None:
    shape = replace(SHAPE, num_collectors=num_collectors)
    load = simulate(shape, COSTS)
    found = results(shape, COSTS, load)
    steps = load.num_steps
    assert steps == SHAPE.num_steps - SHAPE.max_staleness - 1
    for method in ("generator.prepare", "trainer.write", "generator.verify", "generator.commit"):
        assert load.calls[method] == 4 * steps, "one of each replica and version"
    assert load.calls["trainer.step"] == steps
    assert [call for call in load.calls if call.endswith("collect")] == [f"{who}.collect"]
    num_groups = 16 * steps
    assert 0 < load.calls[f"{who}.collect"] <= num_groups + 4 * steps, (
        "by group, and log-prob checks"
    )
    assert load.message_s == pytest.approx(sum(load.calls.values()) * 1e-3, rel=0.1)
    assert 0 < found["controller_wait_share"] < 0.1
    assert found["controller_core_share"] > load.message_s / load.elapsed_s
    assert 500 < found["bytes_per_rollout"] < 20_000


def test_the_controllers_bytes_per_rollout_do_not_grow_with_the_trainers_ranks() -> None:
    few, many = (
        results(shape, COSTS, simulate(shape, COSTS))["bytes_per_rollout"]
        for shape in (SHAPE, Shape(num_replicas=4, num_trainer_ranks=256, num_groups=16))
    )
    assert many < 1.2 * few
