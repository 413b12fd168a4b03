"""Executors of stages that are lost and started again, while the loop runs."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from llamarl.core.errors import ExecutorLost
from llamarl.core.groups import Group, Verdict
from llamarl.core.records import REWARD, Outcome, Prompt, StageResult, StageStatus
from llamarl.planner.simulation.clock import run
from tests.fakes import WatchedStorage
from tests.simulation.faults import Faults, FaultyProcess, dying
from tests.simulation.loop import COSTS, Loop, LoopWorkload, first_error, heavy_tail
from tests.simulation.test_loop import STAGES
from tests.simulation.test_supervisor_replicas import RESTART_COSTS, check_trained

SLOW_COSTS = replace(RESTART_COSTS, score_call_s=0.3)


class RewardStorage(WatchedStorage):
    """Remembers the reward that each row had when it was retired, and what was erased."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards: dict[int, float] = {}
        self.num_erased = 0

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        for rows, names in self._table.groups(row_ids):
            if REWARD in names:
                cells = (await self.read(rows, [REWARD]))[REWARD]
                self.rewards |= {i: cell.item() for i, cell in zip(rows, cells, strict=True)}
        await super().retire(row_ids, outcome)

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        written = [
            row_id
            for rows, has in self._table.groups(row_ids)
            for row_id in rows
            if {*names} & {*has}
        ]
        self.num_erased += len(written)
        await super().erase(row_ids, names)


@dataclass(frozen=True, kw_only=True)
class Fickle(LoopWorkload):
    """Reward code that says something else each time it is asked, or fails."""

    num_calls: Counter[int] = field(default_factory=Counter)

    def score(self, row_id: int, prompt: Prompt) -> StageResult:
        self.num_calls[row_id] += 1
        chance = random.Random(f"{row_id} {self.num_calls[row_id]}").random()
        if chance < 0.02:
            return StageResult(row_id=row_id, status=StageStatus.RAISED, error="simulated")
        return StageResult(row_id=row_id, numbers={REWARD: chance})


@pytest.mark.parametrize(
    ("role", "max_staleness", "is_colocated"),
    [("scorer", 0, False), ("scorer", 1, True), ("judge", 1, False), ("rank", 1, False)],
)
def test_a_stage_that_dies_again_and_again_is_started_again_alone(
    tmp_path: Path, role: str, max_staleness: int, is_colocated: bool
) -> None:
    """The scorer, one that takes rollouts and one that takes groups."""
    loop = Loop(
        num_steps=30,
        max_staleness=max_staleness,
        is_colocated=is_colocated,
        max_stage_restarts=3,
        costs=RESTART_COSTS,
        faults=dying(role, 1.0, 3.0, 5.0),
        stages=STAGES,
        reward_columns=["reward", "blended"],
        num_held_out=4,
        evaluate_every=20,
    )
    run(loop.run(tmp_path))
    check_trained(loop, max_staleness)
    assert loop.cluster.spawned[f"{role} 4"].num_calls["process"] > 0, "it must get work"
    assert [each.version for each in loop.run_logger.evaluations] == [0, 20, 30]
    others = {"scorer", "judge", "rank", "generator-0", "trainer"} - {role}
    assert all(f"{name} 2" not in loop.cluster.spawned for name in others)


def test_the_others_go_on_meanwhile(tmp_path: Path) -> None:
    """All rollouts that may be are written while no scorer is there to score them."""
    loop = Loop(
        num_steps=20,
        max_staleness=4,
        max_stage_restarts=1,
        costs=replace(COSTS, start_s=60.0),
        faults=dying("scorer", 2.0),
    )
    run(loop.run(tmp_path))
    check_trained(loop, 4)
    waits = [b - a for a, b in pairwise(loop.timeline.step_ends_s)]
    after = next(i for i, wait in enumerate(waits) if wait > 50.0)
    assert max(waits[after + 1 : after + 4]) < 0.5, "the next steps' rollouts are there already"


def test_what_a_stage_writes_after_it_was_given_up_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stands still amid a call, cannot be ended, and goes on when another has its place."""
    wakes = Faults(silent_s=(2.0, 38.55), ignores_stop=True, costs=SLOW_COSTS)
    faults = {"scorer": wakes, "scorer 2": Faults(costs=SLOW_COSTS)}
    loop = Loop(max_stage_restarts=1, costs=RESTART_COSTS, faults=faults, num_steps=20)
    with caplog.at_level(logging.INFO):
        run(loop.run(tmp_path))
    check_trained(loop)
    assert loop.timeline.step_ends_s[-1] > 39.5
    assert "rows of scorer, which was lost" in caplog.text


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))])
def test_random_faults_leave_each_rollout_with_the_one_score_it_was_trained_by(
    tmp_path: Path, seed: int
) -> None:
    """Of two stages one or the other dies, also between its write and its answer, or falls silent,
    or goes on when it was given up. Reward code says something else each time."""
    rng = random.Random(seed)
    faults: dict[str, Faults] = {}
    for role in ("scorer", "judge"):
        at_s = 0.0
        for i in range(1, 9):
            at_s += rng.uniform(0.5, 4.0)
            kind = rng.choice(["dies", "dies late", "silent", "wakes", "slow"])
            faults[role + (f" {i}" if i > 1 else "")] = {
                "dies": Faults(dies_at_s=at_s),
                "dies late": Faults(dies_after={"process": rng.randint(1, 9)}),
                "silent": Faults(silent_s=(at_s, at_s + 100.0)),
                "wakes": Faults(silent_s=(at_s, at_s + 37.0), ignores_stop=True, costs=SLOW_COSTS),
                "slow": Faults(dies_at_s=at_s, costs=SLOW_COSTS),
            }[kind]
            at_s += {"silent": 6.5, "wakes": 37.0}.get(kind, 1.5)
    storage, reported = RewardStorage(), dict[int, float | None]()
    workload = Fickle(lengths=(), prompt_tokens=2, length_of=heavy_tail)
    loop = Loop(
        num_steps=100,
        max_stage_restarts=40,
        costs=RESTART_COSTS,
        faults=faults,
        stages=STAGES,
        reward_columns=["reward", "blended"],
        storage=storage,
        workload=workload,
    )
    log_group = loop.run_logger.log_group

    def note(group: Group, verdict: Verdict) -> None:
        log_group(group, verdict)
        for row_id, score in group.scores.items():
            assert row_id not in reported, "a group is settled once"
            reported[row_id] = score.reward if score.has_reward else None

    loop.run_logger.log_group = note  # type: ignore[method-assign]
    run(loop.run(tmp_path))
    check_trained(loop)
    settled = {i: reward for i, reward in reported.items() if i in storage.outcomes}
    assert {i: storage.rewards.get(i) for i in settled} == settled
    assert sum(name in faults for name in loop.cluster.spawned) >= 10, "it must last long enough"
    assert storage.num_erased > 0, "some had written before they were given up"
    assert max(workload.num_calls.values()) > 1


@pytest.mark.parametrize("dies_at_start", [False, True])
def test_a_stage_that_is_lost_too_often_ends_the_run_with_the_key_to_raise(
    tmp_path: Path, dies_at_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(max_stage_restarts=2, faults=dying("scorer", 1.0, 1.0, 1.0))
    if dies_at_start:

        async def fail(*args: object) -> FaultyProcess:
            raise ExecutorLost("scorer", 0, "died as it started")

        loop.executors = replace(loop.executors, start=fail)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert isinstance(error, ExecutorLost)
    assert error.executor == "scorer"
    assert "cluster.max_restarts=2 times in an hour" in caplog.text


def test_a_storage_unit_that_a_stage_needs_is_not_taken_for_its_own_loss(tmp_path: Path) -> None:
    faults = {"storage-0": Faults(dies_at_s=2.0)}
    loop = Loop(max_stage_restarts=2, faults=faults)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert isinstance(error, ExecutorLost)
    assert error.executor == "storage-0"
    assert "scorer 2" not in loop.cluster.spawned
