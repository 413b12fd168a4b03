"""Executors lost at any moment from the last step on, and generators lost while they evaluate."""

import asyncio
import logging
from pathlib import Path

import pytest

from llamarl.checkpoints.checkpoint import latest, version_of
from llamarl.errors import GroupLost
from llamarl.loop.colocation import Colocated
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.types import Columns, Outcome, Prompt, Purpose, Request, Score
from tests.loop.fakes import FakeReplica, FakeScorer, FakeStorage, FakeTrainer
from tests.loop.loop import Loop

NUM_STEPS = 4
NEVER_S = 1e9


class MortalScorer(FakeScorer):
    """Is lost at `dies_at_s`."""

    dies_at_s = NEVER_S

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        scores = await super().score(rollouts)
        check(self.dies_at_s, "scorer")
        return scores


class MortalStorage(FakeStorage):
    """Is lost at `dies_at_s`."""

    dies_at_s = NEVER_S

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        check(self.dies_at_s, "storage-0")
        await super().write(row_ids, columns, attempts)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        check(self.dies_at_s, "storage-0")
        return await super().read(row_ids, names)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        check(self.dies_at_s, "storage-0")
        await super().retire(row_ids, outcome)


class LastSteps(FakeTrainer):
    """Notes when it made its last version, and whether that was exported."""

    last_step_s = 0.0
    has_exported = False

    async def step(self):  # type: ignore[no-untyped-def]
        stats = await super().step()
        self.last_step_s = asyncio.get_running_loop().time()
        return stats

    async def save(self, folder: str) -> None:
        await asyncio.sleep(0.3)
        assert self.returned.is_set()

    async def export(self, folder: str, dtype: str) -> None:
        assert self.returned.is_set()
        self.has_exported = True


def check(dies_at_s: float, name: str) -> None:
    if asyncio.get_running_loop().time() >= dies_at_s:
        raise GroupLost(name, 0, "died")


def few_tokens(request: Request) -> int:
    return 40 if request.purpose is Purpose.EVALUATE else 1 + request.seed % 30


async def play(folder: Path, role: str, dies_at_s: float, placement: str) -> LastSteps:
    trainer, scorer, storage = LastSteps(), MortalScorer(), MortalStorage()
    replica = FakeReplica(0, length=few_tokens)
    for executor, name in ((scorer, "scorer"), (storage, "storage"), (replica, "generator")):
        if name == role:
            executor.dies_at_s = dies_at_s
    loop = Loop(
        num_steps=NUM_STEPS,
        num_held_out=8,
        trainer=trainer,
        scorer=scorer,
        storage=storage,
        replicas={0: replica},
        exports=True,
    )
    if placement == "colocated":
        loop.colocation = Colocated(trainer, {0: replica}, Spans("controller", None))
    await loop.run(folder)
    return trainer


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
@pytest.mark.parametrize("role", ["generator", "scorer", "storage"])
def test_whoever_is_lost_after_the_last_step_costs_nothing_that_was_learnt(
    role: str, placement: str, tmp_path: Path
) -> None:
    last_s = run(play(tmp_path / "whole", "", NEVER_S, placement)).last_step_s
    for number, after_s in enumerate([1e-9, 0.001, 0.02, 0.1, 0.29, 0.31, 0.35, 0.5, 0.8, 1.5]):
        folder = tmp_path / str(number)
        trainer = run(play(folder, role, last_s + after_s, placement))
        assert trainer.last_step_s == last_s
        newest = latest(folder)
        assert newest is not None
        assert version_of(newest) == NUM_STEPS
        assert trainer.has_exported


def length_of(request: Request) -> int:
    return 300 if request.purpose is Purpose.EVALUATE else 4


def test_an_evaluation_holds_back_only_the_replicas_that_it_uses(tmp_path: Path) -> None:
    replicas = {i: FakeReplica(i, length=length_of) for i in range(2)}
    loop = Loop(
        num_steps=40, evaluate_every=20, num_held_out=10, max_staleness=0, replicas=replicas
    )
    made: list[int] = []
    loop.run_logger.log_evaluation = lambda result: made.append(  # type: ignore[method-assign]
        loop.trainer.version - result.version
    )
    run(loop.run(tmp_path))
    # Each rollout of an evaluation takes as long as ten steps or more.
    assert len(made) == 3
    assert min(made[:-1]) >= 8
    writers = {
        request.purpose: index
        for index, replica in replicas.items()
        for request, version in replica.started
        if request.purpose is Purpose.EVALUATE and version == 20
    }
    assert writers == {Purpose.EVALUATE: 1}, "the other one's weights come through replica 0"
    assert max(loop.staleness()) == 0


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 7])
def test_every_version_that_is_due_is_evaluated_whole(
    every: int, num_replicas: int, tmp_path: Path
) -> None:
    replicas = {i: FakeReplica(i, length=length_of) for i in range(num_replicas)}
    loop = Loop(num_steps=15, evaluate_every=every, num_held_out=5, replicas=replicas)
    run(loop.run(tmp_path))
    assert [each.version for each in loop.run_logger.evaluations] == sorted(
        {0, *range(every, 16, every), 15}
    )
    assert {each.num_prompts for each in loop.run_logger.evaluations} == {5}


@pytest.mark.parametrize("dies_at_s", [4.0, 5.5])
def test_a_generator_lost_while_it_evaluates_costs_that_evaluation_only(
    dies_at_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = {i: FakeReplica(i, length=length_of, token_s=0.02) for i in range(2)}
    replicas[1].dies_at_s = dies_at_s
    loop = Loop(num_steps=60, evaluate_every=30, num_held_out=6, replicas=replicas)
    with caplog.at_level(logging.WARNING):
        run(loop.run(tmp_path))
    assert loop.trainer.version == 60
    assert [each.version for each in loop.run_logger.evaluations] == [30, 60]
    assert "version 0: 6 of 6 prompts were not evaluated" in caplog.text
