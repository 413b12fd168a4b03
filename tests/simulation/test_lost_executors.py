"""Executors lost at any moment from the last step on, and generators lost while they evaluate."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.core.checkpoint import latest, version_of
from llamarl.core.records import Purpose, Request
from llamarl.planner.simulation.clock import run
from llamarl.planner.simulation.replica import SimulatedReplica
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop

NUM_STEPS = 4


def few_tokens(request: Request) -> int:
    return 40 if request.purpose is Purpose.EVALUATE else 1 + request.seed % 30


def play(folder: Path, role: str, dies_at_s: float | None, is_colocated: bool) -> Loop:
    loop = Loop(
        num_steps=NUM_STEPS,
        num_held_out=8,
        length=few_tokens,
        is_colocated=is_colocated,
        costs=replace(COSTS, save_s=0.3),
        faults={role: Faults(dies_at_s=dies_at_s)},
        exports=True,
    )
    run(loop.run(folder))
    return loop


@pytest.mark.full
@pytest.mark.parametrize("is_colocated", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("role", ["generator-0", "scorer", "storage-0"])
def test_an_executor_lost_after_the_last_step_costs_nothing_that_was_learnt(
    role: str, is_colocated: bool, tmp_path: Path
) -> None:
    last_s = play(tmp_path / "whole", role, None, is_colocated).timeline.step_ends_s[-1]
    for number, after_s in enumerate([1e-9, 0.001, 0.02, 0.1, 0.29, 0.31, 0.35, 0.5, 0.8, 1.5]):
        folder = tmp_path / str(number)
        loop = play(folder, role, last_s + after_s, is_colocated)
        assert loop.timeline.step_ends_s[-1] == last_s
        newest = latest(folder)
        assert newest is not None
        assert version_of(newest) == NUM_STEPS
        assert loop.process("trainer").num_calls["export"] == 1


def length_of(request: Request) -> int:
    return 300 if request.purpose is Purpose.EVALUATE else 4


def test_an_evaluation_holds_back_only_the_replicas_that_it_uses(tmp_path: Path) -> None:
    loop = Loop(
        num_steps=40,
        evaluate_every=20,
        num_held_out=10,
        max_staleness=0,
        num_replicas=2,
        length=length_of,
    )
    made: list[int] = []
    loop.run_logger.log_evaluation = lambda result: made.append(  # type: ignore[method-assign]
        loop.trainer.version - result.version
    )
    evaluates: dict[int, set[int]] = {}  # by version
    for index, replica in loop.executors.generators.items():
        watch_submit(replica.executor, index, evaluates)
    run(loop.run(tmp_path))
    # Each rollout of an evaluation takes as long as ten steps or more.
    assert len(made) == 3
    assert min(made[:-1]) >= 8
    assert evaluates[20] == {1}, "the other one's weights come through replica 0"
    assert max(loop.staleness()) == 0


def watch_submit(replica: SimulatedReplica, index: int, evaluates: dict[int, set[int]]) -> None:
    """Note by version which replicas are asked to evaluate it."""
    submit = replica.submit

    async def watched(requests: list[Request]) -> None:
        for request in requests:
            if request.purpose is Purpose.EVALUATE:
                assert replica.version == request.min_version
                evaluates.setdefault(request.min_version, set()).add(index)
        await submit(requests)

    replica.submit = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "num_replicas",
    [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("every", [1, 7])
def test_every_version_that_is_due_is_evaluated_whole(
    every: int, num_replicas: int, tmp_path: Path
) -> None:
    loop = Loop(
        num_steps=15,
        evaluate_every=every,
        num_held_out=5,
        num_replicas=num_replicas,
        length=length_of,
    )
    run(loop.run(tmp_path))
    assert [each.version for each in loop.run_logger.evaluations] == sorted(
        {0, *range(every, 16, every), 15}
    )
    assert {each.num_prompts for each in loop.run_logger.evaluations} == {5}


@pytest.mark.parametrize("dies_at_s", [4.0, 5.5])
def test_a_generator_lost_while_it_evaluates_costs_that_evaluation_only(
    dies_at_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(
        num_steps=60,
        evaluate_every=30,
        num_held_out=6,
        num_replicas=2,
        length=length_of,
        costs=replace(COSTS, decode_step_s=0.02),
        faults={"generator-1": Faults(dies_at_s=dies_at_s)},
    )
    with caplog.at_level(logging.WARNING):
        run(loop.run(tmp_path))
    assert loop.trainer.version == 60
    assert [each.version for each in loop.run_logger.evaluations] == [30, 60]
    assert {each.num_prompts for each in loop.run_logger.evaluations} == {6}
    assert "version 0 has no held-out accuracy, for generators were lost" in caplog.text
