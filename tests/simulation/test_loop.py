"""The real controller on simulated executors and a virtual clock."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from llamarl.core.groups import Batch
from llamarl.core.records import Request
from llamarl.metrics.console import Progress
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import Spans
from llamarl.metrics.trackers import MetricsLog
from llamarl.planner.simulation.clock import run
from llamarl.scoring.stages import Stage
from tests.fakes import nothing
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop, first_error, slower

HARD = {"drop_share": 0.2, "failed_share": 0.02}


def one_token(request: Request) -> int:
    return 1


def four_tokens(request: Request) -> int:
    return 4


@pytest.mark.parametrize("late", ["wait", "mask"])
@pytest.mark.parametrize("num_steps", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "max_staleness", [0, *(pytest.param(bound, marks=pytest.mark.long) for bound in (1, 4)), 2]
)
def test_the_bound_is_never_exceeded_and_is_reached(
    num_steps: int, max_staleness: int, late: str, tmp_path: Path
) -> None:
    loop = Loop(
        max_staleness=max_staleness,
        late=late,
        num_steps=num_steps,
        segment_tokens=16,
        **HARD,
        costs=replace(COSTS, part_s=0.05),
        num_replicas=3,
        max_num_seqs=8,
        faults={
            "generator-1": slower(decode_step_s=0.05, commit_s=0.2),
            "generator-2": Faults(dies_at_s=num_steps / 25),
        },
    )
    run(loop.run(tmp_path))
    ages = loop.staleness()
    assert loop.trainer.version == num_steps
    assert len(ages) > 10 * num_steps
    # With "wait" the order alone must keep the bound: nothing may need masking.
    assert max(ages if late == "mask" else ages + loop.masked()) == max_staleness
    assert "equal_rewards" in loop.run_logger.drops
    assert "failed_reward" in loop.run_logger.drops


@pytest.mark.parametrize("num_steps", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_no_rollout_is_trained_twice_and_every_group_is_whole(
    num_steps: int, tmp_path: Path
) -> None:
    loop = Loop(num_steps=num_steps, **HARD)
    run(loop.run(tmp_path))
    rows = Counter(loop.trained_rows())
    groups = Counter(row.group_id for batch in loop.batches for row in batch.rows)
    assert set(rows.values()) == {1}
    assert set(groups.values()) == {2}
    assert loop.storage.count("trained") == len(rows) == num_steps * 4 * 2
    assert loop.storage.count("dropped") == 2 * len(loop.run_logger.drops)


STAGES = (
    Stage("brief", nothing, ["completion"]),
    Stage("judge", nothing, ["completion"], ["quality"]),
    Stage("double", nothing, ["quality"], ["twice"]),
    Stage("rank", nothing, ["reward", "twice"], ["ranked"], per="group"),
    Stage("blend", nothing, ["ranked", "quality"], ["blended"], per="group"),
)


@pytest.mark.full
@pytest.mark.parametrize("late", ["mask", pytest.param("wait", marks=pytest.mark.long)])
def test_a_graph_of_six_stages_that_drop_and_fail_keeps_the_bound_and_loses_no_rollout(
    late: str, tmp_path: Path
) -> None:
    loop = Loop(
        num_steps=60,
        late=late,
        rollouts_per_prompt=4,
        stages=STAGES,
        reward_columns=("reward", "blended"),
        stage_drop_share=0.05,
        **HARD,
        num_replicas=2,
        faults={"generator-1": Faults(dies_at_s=3.0)},
    )
    run(loop.run(tmp_path))
    assert loop.trainer.version == 60
    assert max(loop.staleness()) == 1
    trained = loop.trained_rows()
    assert len(trained) == len(set(trained))
    outcomes = loop.storage.outcomes
    assert {outcomes[row_id]["outcome"] for row_id in trained} == {"trained"}
    assert loop.storage.count("trained") == len(trained)
    assert not loop.storage._table, "nothing is left behind"
    reasons = {str(found["reason"]) for found in outcomes.values() if "reason" in found}
    assert {f"{stage.name}_said_no" for stage in STAGES} <= reasons
    assert "judge_failed" in reasons
    sizes = Counter(row.group_id for batch in loop.batches for row in batch.rows)
    assert set(sizes.values()) == {2, 3, 4}, "a group goes on without what was dropped"


def test_groups_are_trained_in_admission_order(tmp_path: Path) -> None:
    loop = Loop(num_steps=100, max_staleness=2)
    run(loop.run(tmp_path))
    assert groups_of(loop) == sorted(groups_of(loop))


def test_masking_overtakes_late_groups(tmp_path: Path) -> None:
    loop = Loop(num_steps=100, max_staleness=2, late="mask")
    run(loop.run(tmp_path))
    assert groups_of(loop) != sorted(groups_of(loop))
    assert loop.masked(), "nothing was ever masked: the test would pass without masking"


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_on_policy_training_survives_ninety_percent_drops(num_steps: int, tmp_path: Path) -> None:
    loop = Loop(max_staleness=0, num_steps=num_steps, drop_share=0.9)
    run(loop.run(tmp_path))
    assert loop.trainer.version == num_steps
    assert len(loop.run_logger.drops) > 5 * num_steps * 4
    assert max(loop.staleness()) == 0


def test_a_run_without_any_signal_stops_and_says_why(tmp_path: Path) -> None:
    loop = Loop(drop_share=1.0, max_drops_in_row=100)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert "100 x equal_rewards" in str(error)


def test_the_first_forward_starts_before_the_last_group_arrives(tmp_path: Path) -> None:
    costs = replace(COSTS, part_s=0.001)
    loop = Loop(num_steps=20, tokens_per_micro_batch=1, max_staleness=0, costs=costs)
    run(loop.run(tmp_path))
    spread = [times[-1] - times[0] for times in loop.part_starts.values()]
    assert max(len(times) for times in loop.part_starts.values()) > 1
    # A slow rollout takes 0.4 s or more; the groups before it did not wait for it.
    assert max(spread) > 0.3


def test_an_exception_in_the_trainer_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(faults={"trainer": Faults(errors={"step": (4, ArithmeticError())})})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ArithmeticError)
    assert loop.trainer.version == 3


@pytest.mark.parametrize(
    ("name", "method"), [("generator-0", "collect"), ("scorer", "process"), ("storage-0", "write")]
)
def test_an_exception_in_any_stage_ends_the_run(name: str, method: str, tmp_path: Path) -> None:
    loop = Loop(faults={name: Faults(errors={method: (3, ZeroDivisionError("boom"))})})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ZeroDivisionError)


def test_losing_every_replica_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(faults={"generator-0": Faults(dies_at_s=2.0)})
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    # It depends on which notices first: the dispatcher, or a publish that is under way.
    expected = "every generator replica is lost|no generator took version"
    assert re.search(expected, str(first_error(caught.value)))


def test_evaluations_see_one_version_and_are_never_trained(tmp_path: Path) -> None:
    loop = Loop(num_steps=30, evaluate_every=10, num_held_out=25)
    run(loop.run(tmp_path))
    assert [evaluation.version for evaluation in loop.run_logger.evaluations] == [0, 10, 20, 30]
    assert loop.storage.count("evaluated") == 4 * 25
    assert all(loop.storage.outcomes[i]["outcome"] == "trained" for i in loop.trained_rows())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_colocated_executors_alternate_and_train_the_same_groups(
    max_staleness: int, tmp_path: Path
) -> None:
    def trained(is_colocated: bool) -> Loop:
        loop = Loop(
            num_steps=20,
            max_staleness=max_staleness,
            evaluate_every=5,
            num_held_out=10,
            num_replicas=2,
            length=four_tokens,
            is_colocated=is_colocated,
        )
        run(loop.run(tmp_path / str(is_colocated)))
        return loop

    together, apart = trained(True), trained(False)
    evaluated = [evaluation.version for evaluation in together.run_logger.evaluations]
    assert evaluated == [0, 5, 10, 15, 20]
    assert together.trainer.version == 20
    assert max(together.staleness()) <= max_staleness
    assert groups_of(together) == groups_of(apart)


def groups_of(loop: Loop) -> list[int]:
    """Group ids in the order of training."""
    return [row.group_id for batch in loop.batches for row in batch.rows]


def test_a_batch_that_is_ready_is_sent_before_the_metrics_of_the_step_before_are_made(
    tmp_path: Path,
) -> None:
    """Those of thousands of rollouts take a while, in which the trainer would wait."""
    done: list[tuple[str, int]] = []
    loop = Loop(num_steps=6, parts="batch", length=one_token, costs=replace(COSTS, part_s=9.0))
    accumulate = loop.trainer.accumulate

    async def note_batch(batch: Batch) -> None:
        done.append(("batch", batch.version))
        await accumulate(batch)

    class NotedLog(MetricsLog):
        def log(self, step: int, *values: object) -> None:
            done.append(("metrics", step))

    loop.trainer.accumulate = note_batch
    with (tmp_path / "console").open("w") as file:
        progress = Progress(6, live=False, console=Console(file=file))
        spans = Spans("controller", None)
        logger = RunLogger(log=NotedLog(tmp_path), progress=progress, spans=spans)
        loop.run_logger = logger  # type: ignore[assignment]
        run(loop.run(tmp_path))
    both = [(what, version) for version in range(1, 6) for what in ("batch", "metrics")]
    assert done == [("batch", 0), *both, ("metrics", 6)]
