"""What the benchmarks work out, on spans and shapes written by hand."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.metrics.span import Span
from llamarl.planner.simulation.clock import run
from llamarl.publish.layout import RankLayout
from llamarl.publish.reshard import num_bytes, plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench_controller import results, simulate
from controller_bench import clock
from controller_bench.charged import IdleReplica, IdleTrainer, Load
from controller_bench.clock import CostClock
from controller_bench.messages import MessageCosts
from controller_bench.simulation import Shape
from weights_bench.decoding import longest_gap_s, tokens_per_s
from weights_bench.model import Model, generator_layouts, llama, trainer_layouts

MS = 10**6


def step(start_ms, end_ms, tokens=64):
    return Span(0, "decode", "busy", start_ms * MS, end_ms * MS, {"tokens": tokens})


STEPS = [step(0, 10), step(11, 20), step(26, 36), step(37, 47), step(67, 77)]


def test_the_longest_gap_is_one_between_steps_that_the_window_touches() -> None:
    assert longest_gap_s(STEPS, 0, 46 * MS) == pytest.approx(0.006)
    assert longest_gap_s(STEPS, 22 * MS, 23 * MS) == pytest.approx(0.006)  # nothing but the gap
    assert longest_gap_s(STEPS, 28 * MS, 50 * MS) == pytest.approx(0.020)
    assert math.isnan(longest_gap_s(STEPS, 80 * MS, 90 * MS))


def test_a_step_that_the_window_cuts_counts_in_part() -> None:
    assert tokens_per_s(STEPS, 0, 20 * MS) == pytest.approx(128 / 0.020)
    assert tokens_per_s(STEPS, 5 * MS, 31 * MS) == pytest.approx((32 + 64 + 32) / 0.026)
    assert tokens_per_s(STEPS, 50 * MS, 60 * MS) == 0


def test_the_benchmark_model_is_planned_whole_with_norms_on_both_ranks() -> None:
    model = Model(llama(1, vocab_size=96, hidden_size=64, intermediate_size=160), "bfloat16")
    source, target = [], []
    for rank in range(2):
        for layouts, side in (
            (trainer_layouts(model, rank), source),
            (generator_layouts(model, rank)[0], target),
        ):
            side.append(RankLayout(rank=rank, host="here", parameters=layouts))
    copies = plan(source, target)
    assert num_bytes(copies) == model.num_bytes + 3 * 64 * 2  # three norms more
    assert {copy.source_rank for copy in copies} == {0, 1}


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


@pytest.mark.parametrize("num_objects", [0, 1500, 3000])
def test_the_controller_pays_for_looking_for_cycles_once_its_own_objects_demand_it(
    num_objects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[object]] = []

    def look(generation: int) -> None:
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass

    async def leave(number: int) -> None:
        kept.extend([] for _ in range(number))

    async def both() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CostClock)
        await asyncio.sleep(1.0)
        before_s = loop.cpu_s
        monkeypatch.setattr(clock, "GC_THRESHOLDS", (2000, 20, 20))
        await loop.model(leave(3000))
        await loop.create_task(leave(num_objects))
        await asyncio.sleep(1.0)
        monkeypatch.undo()
        return loop.cpu_s - before_s

    gc.collect()
    gc.disable()
    monkeypatch.setattr(clock.gc, "collect", look)
    try:
        with asyncio.Runner(loop_factory=CostClock) as runner:
            cpu_s = runner.run(both())
    finally:
        gc.enable()
    assert (cpu_s > 0.03) is (num_objects == 3000)


def test_a_replica_waits_from_the_trainers_answer_or_from_its_commit_if_that_is_later() -> None:
    load = Load()
    trainer = IdleTrainer(load, {})
    replica = IdleReplica(load, SimpleNamespace(num_running=3, version=1), 4, trainer)

    async def wait_twice() -> None:
        trainer.arrive("step", ())
        await asyncio.sleep(1.0)
        trainer.leave("step", None)
        await asyncio.sleep(0.5)
        replica.arrive("submit", ([SimpleNamespace(min_version=2)],))  # its version must come first
        replica.arrive("submit", ([SimpleNamespace(min_version=1)],))
        replica.leave("commit", None)
        await asyncio.sleep(0.25)
        replica.arrive("submit", ([SimpleNamespace(min_version=0)],))

    run(wait_twice())
    assert load.waits == [(1.0, 1.5, "replica"), (1.5, 1.75, "replica")]
