"""The life of a rollout: written, through its stages, with one outcome, whatever takes how long."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from llamarl.controller.rollouts import Rollouts
from llamarl.core.groups import Group
from llamarl.core.records import (
    EpisodeState,
    FinishReason,
    Purpose,
    Request,
    RolloutInfo,
    StageResult,
    StageStatus,
    TurnResult,
    conversation_row,
)
from llamarl.scoring.stages import Graph, Stage, make_graph
from llamarl.storage.archive import make_record
from llamarl.storage.columns import Column
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.task_loss import TaskConfig
from tests.fakes import RolloutSetting, good, group_of, nothing, request, stopped
from tests.planner.planner_recipes import make_recipe
from tests.random_search import case, searched

OWN = make_graph(
    make_recipe(algorithm=AIPOConfig(reward_columns=["ranked"])),
    [
        Stage("short", nothing, ["completion"]),
        Stage("judge", nothing, ["completion"], ["quality"]),
        Stage("rank", nothing, ["reward", "quality"], ["ranked"], per="group"),
    ],
)


def draw_graph(rng: random.Random) -> Graph:
    """A graph with up to five stages of its own, which read what others before them write."""
    stages: list[Stage] = []
    columns = ["reward"]
    for number in range(rng.randint(0, 5)):
        reads = rng.sample(columns, rng.randint(0, min(2, len(columns))))
        name = f"stage{number}"
        if not reads and rng.random() < 0.3:
            column = f"log{number}"
            stages.append(Stage(name, nothing, ["completion"]))
            continue
        column = f"c{number}"
        per = rng.choice(["rollout", "group"])
        stages.append(Stage(name, nothing, reads or ["completion"], [column], per=per))
        columns.append(column)
    algorithm = AIPOConfig(
        kl_coefficient=rng.choice([0.0, 0.1]),
        reward_columns=columns,
        reward_column_weights=[1.0] * len(columns),
    )
    return make_graph(make_recipe(algorithm=algorithm), stages)


def draw_result(name: str, share: float, seed: float) -> Callable[[int], StageResult]:
    def result(row_id: int) -> StageResult:
        chance = random.Random(f"{name} {row_id} {seed}").random()
        if chance < share / 2:
            return StageResult(row_id=row_id, reason=f"{name}_said_no")
        if chance < share:
            return StageResult(row_id=row_id, status=StageStatus.HUNG)
        return StageResult(row_id=row_id, numbers={name: chance})

    return result


@searched(few=60, many=2000)
def test_every_rollout_passes_every_stage_once_and_in_order(seeds: Sequence[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        setting = RolloutSetting(draw_graph(rng), rng)
        share, size = rng.choice([0.0, 0.2, 0.7]), rng.randint(1, 4)
        for name, stage in setting.stages.items():
            stage.longest_s = rng.choice([0.0, 0.05, 5.0])
            if name != "score" and not stage.stage.is_model:
                stage.result = draw_result(name, share, seed)
        groups = [group_of(*range(first, first + size)) for first in range(0, 5 * size, size)]
        rows = {row_id for group in groups for row_id in group.row_ids}
        setting.dispatch.num_cuts = Counter({row_id: rng.choice([0, 0, 2]) for row_id in rows})
        cuts = setting.dispatch.num_cuts.total()
        with case(seed):
            setting.roll_out(*groups)
            check(setting, groups, rows)
            assert len(setting.dispatch.asked) == len(rows) + cuts


def check(setting: RolloutSetting, groups: Sequence[Group], rows: set[int]) -> None:
    """`FakeStage` asserts order and that no rollout comes twice or after its drop."""
    dropped = {row_id for group in groups for row_id in group.dropped}
    for group in groups:
        assert group.rollouts == {row_id: stopped(row_id, (0, 2)) for row_id in group.row_ids}
    for fake in setting.stages.values():
        assert {*fake.rows} >= rows - dropped
        for items in fake.begun:
            for row_ids, _ in items:
                (group,) = [each for each in groups if row_ids[0] in each.row_ids]
                if fake.stage.per == "group":
                    assert {*row_ids} >= {*group.row_ids} - dropped
                else:
                    assert len(row_ids) == 1
                for row_id in row_ids:
                    if fake.result is not None and fake.stage.name != "score":
                        numbers = fake.result(row_id).numbers
                        assert group.numbers[row_id].items() >= numbers.items()


def test_a_rollout_is_scored_while_others_of_its_group_are_written() -> None:
    setting = RolloutSetting()
    group = group_of(0, 1)
    setting.dispatch.num_cuts[1] = 30
    setting.dispatch.longest_s = 10.0
    setting.roll_out(group)
    assert [items[0][0] for items in setting.stages["score"].begun] == [(0,), (1,)]


def test_an_evaluation_is_scored_and_passes_no_other_stage() -> None:
    setting = RolloutSetting()
    group = group_of(7)

    async def work(rollouts: Rollouts) -> None:
        await rollouts.roll_out(group, [request(7, Purpose.EVALUATE)])
        assert rollouts.rows(Purpose.EVALUATE) == [7]
        assert rollouts.rows(Purpose.TRAIN, Purpose.CHECK) == []

    setting.run(work)
    assert setting.stages["score"].rows == [7]
    assert setting.stages["infer"].rows == []
    assert group.scores == {7: good(7)}


def test_what_was_aborted_passes_no_stage_and_a_cut_rollout_stops_there() -> None:
    setting = RolloutSetting()
    setting.dispatch.stop = lambda each: stopped(each.row_id, reason=FinishReason.ABORTED)
    setting.dispatch.num_cuts[1] = 5
    group = group_of(0, 1)

    async def work(rollouts: Rollouts) -> None:
        writing = asyncio.create_task(rollouts.roll_out(group, [request(0), request(1)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await rollouts.abort([0, 1])
        await writing

    setting.run(work)
    assert setting.dispatch.aborted == [0, 1]
    assert len(setting.dispatch.asked) <= 2
    assert group.rollouts[0].finish_reason is FinishReason.ABORTED
    assert not setting.stages["score"].begun or setting.stages["score"].rows == [1]


def test_a_failed_score_drops_nothing() -> None:
    setting = RolloutSetting()
    failed = StageResult(row_id=1, status=StageStatus.HUNG, error="too slow")
    setting.stages["score"].result = lambda row_id: failed if row_id else good(0)
    group = group_of(0, 1)
    setting.roll_out(group)
    assert group.scores == {0: good(0), 1: failed}
    assert not group.dropped, "the group's filter knows what a failed score means"


def test_a_group_goes_on_without_what_its_stages_dropped() -> None:
    setting = RolloutSetting(OWN)
    setting.stages["short"].result = lambda row_id: StageResult(
        row_id=row_id, reason="rambling" if row_id == 1 else ""
    )
    setting.stages["short"].longest_s = 0.0
    setting.stages["judge"].result = lambda row_id: StageResult(
        row_id=row_id, numbers={"quality": 2.0}
    )
    group = group_of(0, 1, 2)

    async def work(rollouts: Rollouts) -> None:
        await rollouts.roll_out(group, [request(row_id) for row_id in group.row_ids])
        assert setting.stages["rank"].begun == [[((0, 2), None)]]
        await rollouts.leave_out(group)
        assert (group.row_ids, sorted(group.rollouts), sorted(group.scores)) == (
            (0, 2),
            [0, 2],
            [0, 2],
        )
        assert rollouts.rows(Purpose.TRAIN) == [0, 2]

    setting.run(work)
    assert group.numbers[0] == {"quality": 2.0}
    left_out = {"outcome": "dropped", "reason": "rambling", "left_out": 1, "group_id": 0}
    assert setting.storage.outcomes == {1: left_out}


def test_the_record_of_a_dropped_rollout_says_why() -> None:
    setting = RolloutSetting(OWN)
    setting.stages["short"].result = lambda row_id: StageResult(
        row_id=row_id, status=StageStatus.RAISED, error="ZeroDivisionError"
    )
    end = TurnResult(row_id=1, attempt=0, state=EpisodeState.LOST, error="its process was lost")
    setting.dispatch.stop = lambda request: replace(
        stopped(request.row_id, (0, 2)), episode=end if request.row_id == 1 else None
    )
    group = group_of(0, 1)

    async def work(rollouts: Rollouts) -> None:
        asked = [request(0), replace(request(1), prompt=group.prompt)]
        await rollouts.roll_out(group, asked)

    setting.run(work)
    raised, lost = (make_record(group, row_id, {"outcome": "dropped"}) for row_id in (0, 1))
    assert raised["error"] == "ZeroDivisionError"
    assert lost["error"] == "lost more than environment.max_restarts=0 times: its process was lost"


def test_a_stage_that_writes_per_token_gets_each_conversation_and_others_the_first() -> None:
    per_token = Stage("tokens", nothing, ["completion"], [Column("marks", "float32", "response")])
    grouped = Stage(
        "both", nothing, ["marks"], [Column("more", "float32", "response")], per="group"
    )
    number = Stage("judge", nothing, ["completion"], ["quality"])
    algorithm = TaskConfig(reward_columns=["quality"], loss_columns=["more"])
    setting = RolloutSetting(
        make_graph(make_recipe(algorithm=algorithm), [per_token, grouped, number])
    )
    further = tuple(stopped(conversation_row(0, k), (0, 2)) for k in (1, 2))

    def stop(each: Request) -> RolloutInfo:
        found = stopped(each.row_id, (0, 3))
        return replace(found, conversations=further) if each.row_id == 0 else found

    setting.dispatch.stop = stop
    group = group_of(0, 1)
    setting.roll_out(group)
    whole = sorted([0, 1, *(row.row_id for row in further)])
    assert sorted(setting.stages["tokens"].rows) == whole
    (items,) = setting.stages["both"].begun
    assert sorted(items[0][0]) == whole
    for name in ("judge", "score"):
        assert sorted(setting.stages[name].rows) == [0, 1]
    assert group.scores.keys() == {0, 1}
    assert sorted(row.row_id for row in group.sequences) == whole
