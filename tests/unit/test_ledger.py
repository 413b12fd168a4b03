"""The ledger hands each row to a stage once, whatever order stages end in."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.experience.graph import Graph, Stage, make_graph
from llamarl.loop.ledger import Ledger
from llamarl.planner.simulation import clock
from llamarl.types import (
    REWARD,
    FinishReason,
    Group,
    Prompt,
    Purpose,
    Request,
    RolloutInfo,
    Sampling,
    StageResult,
    StageStatus,
    VersionSpan,
)
from tests.unit.planner_recipes import make_recipe

PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1,))
NUM_ROWS = 12
KL = make_graph(make_recipe(algorithm=AIPOConfig(kl_coefficient=0.1)))
DONE = ("generate", "score", "infer")


def request(row_id: int, purpose: Purpose = Purpose.TRAIN) -> Request:
    sampling = Sampling(max_tokens=8)
    return Request(row_id=row_id, prompt_ids=(1,), sampling=sampling, seed=0, purpose=purpose)


def row(row_id: int) -> RolloutInfo:
    return RolloutInfo(
        row_id=row_id,
        num_prompt_tokens=1,
        num_tokens=2,
        spans=(VersionSpan(version=0, num_tokens=2),),
        finish_reason=FinishReason.STOP,
    )


def filled(num_rows: int = NUM_ROWS, graph: Graph = KL, rows_per_group: int = 1) -> Ledger:
    """Training rows in groups of `rows_per_group`."""
    ledger = Ledger(graph, pause_s=0.0)
    for first in range(0, num_rows, rows_per_group):
        row_ids = tuple(range(first, first + rows_per_group))
        group = Group(group_id=first, prompt=PROMPT, row_ids=row_ids, min_version=0)
        for row_id in row_ids:
            ledger.add(request(row_id), PROMPT, group)
    return ledger


async def take_all(ledger: Ledger, stage: str) -> list[int]:
    """Every row that is ready now."""
    return [row_id for row_ids in await take_items(ledger, stage) for row_id in row_ids]


async def take_items(ledger: Ledger, stage: str) -> list[tuple[int, ...]]:
    taken: list[tuple[int, ...]] = []
    while True:
        try:
            taken += await asyncio.wait_for(ledger.take(stage, limit=3), 0.001)
        except TimeoutError:
            return taken


marks = st.permutations([(i, stage) for i in range(NUM_ROWS) for stage in DONE])


@settings(max_examples=40, deadline=None)
@given(marks=marks, num_marked=st.integers(0, NUM_ROWS * len(DONE)), chosen=st.randoms())
def test_a_stage_gets_exactly_the_rows_that_all_it_needs_are_done_with_and_each_once(
    marks: list[tuple[int, str]], num_marked: int, chosen: random.Random
) -> None:
    async def scenario() -> None:
        ledger = filled()
        done: dict[int, set[str]] = {i: set() for i in range(NUM_ROWS)}
        taken: dict[str, list[int]] = {"score": [], "infer": [], "settle": []}
        missed: dict[str, set[int]] = {"score": set(), "infer": set(), "settle": set()}
        for row_id, stage in marks[:num_marked]:
            if stage in taken and row_id not in taken[stage]:
                missed[stage].add(row_id)  # done before it was taken: nothing is left to do
            done[row_id].add(stage)
            for _ in range(chosen.randint(1, 2)):  # saying it twice changes nothing
                ledger.finish(stage, [row_id])
            if chosen.random() < 0.1:
                stage = chosen.choice(list(taken))
                taken[stage] += await take_all(ledger, stage)
        for stage, rows in taken.items():
            rows += await take_all(ledger, stage)
            ready = {i for i in range(NUM_ROWS) if KL.needs[stage] <= done[i]}
            assert sorted(rows) == sorted(ready - missed[stage])

    asyncio.run(scenario())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_takers=st.integers(2, 6))
def test_concurrent_takers_share_the_rows_without_a_double_though_some_die(
    seed: int, num_takers: int
) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        ledger = filled(200)
        written: list[int] = []

        async def consume() -> None:
            while True:
                taken = await ledger.take("score", limit=rng.randint(1, 9))
                await asyncio.sleep(0)
                if rng.random() < 0.2:  # dies between taking and writing
                    ledger.put_back("score", taken)
                    continue
                row_ids = [row_id for row_ids in taken for row_id in row_ids]
                ledger.finish("score", row_ids)
                written.extend(row_ids)

        takers = [asyncio.create_task(consume()) for _ in range(num_takers)]
        order = rng.sample(range(200), 200)
        while order:
            size = rng.randint(1, 20)
            ledger.finish("generate", order[:size])
            del order[:size]
            await asyncio.sleep(0)
        for _ in range(400):
            await asyncio.sleep(0)
        for taker in takers:
            taker.cancel()
        assert sorted(written) == list(range(200))

    asyncio.run(scenario())


def test_a_stage_that_pauses_gets_what_came_meanwhile_together() -> None:
    async def scenario() -> None:
        ledger = Ledger(KL, pause_s=5.0)
        for row_id in range(4):
            ledger.add(request(row_id), PROMPT)
        ledger.finish("generate", [0])
        assert await ledger.take("score") == [(0,)]
        for row_id in (1, 2):
            ledger.finish("generate", [row_id])
        assert await ledger.take("score", limit=1) == [(1,)]
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert await ledger.take("score") == [(2,)], "no pause while some are left"
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert await ledger.take("infer") == [(0,), (1,), (2,)]
        ledger.finish("generate", [3])
        assert await ledger.take("infer") == [(3,)], "a model's calls never overlap"
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)

    clock.run(scenario())


def test_rows_are_taken_in_the_order_they_became_ready_and_at_most_limit_at_once() -> None:
    async def scenario() -> None:
        ledger = filled()
        ledger.finish("generate", [7, 2])
        ledger.finish("generate", [5])
        assert await ledger.take("score", limit=2) == [(7,), (2,)]
        assert await ledger.take("score", limit=2) == [(5,)]

    asyncio.run(scenario())


def test_a_sleeping_taker_wakes_when_a_row_becomes_ready() -> None:
    async def scenario() -> None:
        ledger = filled()
        taking = asyncio.create_task(ledger.take("score"))
        await asyncio.sleep(0)
        assert not taking.done()
        ledger.finish("generate", [3])
        assert await asyncio.wait_for(taking, 1) == [(3,)]

    asyncio.run(scenario())


def test_a_forgotten_row_reaches_no_stage_and_what_comes_later_of_it_is_ignored() -> None:
    async def scenario() -> None:
        ledger = filled()
        ledger.finish("generate", [1, 2])
        ledger.forget([1])
        ledger.finish("score", [1], [StageResult(row_id=1, numbers={REWARD: 1.0})])
        assert await take_all(ledger, "score") == [2]
        assert ledger.rows(Purpose.TRAIN) == [i for i in range(NUM_ROWS) if i != 1]

    asyncio.run(scenario())


def test_evaluation_rows_are_scored_but_never_settled_or_inferred() -> None:
    async def scenario() -> None:
        ledger = filled(1)
        ledger.add(request(9, Purpose.EVALUATE), PROMPT)
        ledger.finish("generate", [0, 9])
        assert await take_all(ledger, "score") == [0, 9]
        assert await take_all(ledger, "infer") == [0]
        for stage in DONE:
            ledger.finish(stage, [0, 9])
        assert await take_all(ledger, "settle") == [0]
        assert ledger.rows(Purpose.EVALUATE) == [9]

    asyncio.run(scenario())


def test_an_evaluation_gets_a_rollout_once_it_is_scored_though_it_was_never_written() -> None:
    async def scenario() -> None:
        ledger = filled(0)
        for row_id in range(3):
            ledger.add(request(row_id, Purpose.EVALUATE), PROMPT)
        ledger.finish("generate", [0, 1])
        assert await take_all(ledger, "evaluate") == []
        ledger.finish("score", [1, 2])
        assert await take_all(ledger, "evaluate") == [1, 2]

    asyncio.run(scenario())


def test_what_is_learnt_reaches_entry_group_and_stages_a_failed_score_too() -> None:
    async def scenario() -> None:
        ledger = filled(2, make_graph(make_recipe()), rows_per_group=2)
        group = ledger.entries[0].group
        assert group is not None
        good = StageResult(row_id=0, numbers={REWARD: 1.0})
        failed = StageResult(row_id=1, status=StageStatus.HUNG, error="too slow")
        ledger.learn_rollouts([row(0), row(1)])
        ledger.finish("score", [1, 0], [failed, good])
        assert group.rollouts == {0: row(0), 1: row(1)}
        assert group.scores == {0: good, 1: failed}
        assert (ledger.entries[1].rollout, ledger.entries[1].score) == (row(1), failed)
        assert await take_items(ledger, "settle") == [(0, 1)]
        assert not group.dropped, "the group's filter knows what a failed score means"

    asyncio.run(scenario())


def nothing(*read: object) -> None:
    """Nobody calls it here."""


OWN = make_graph(
    make_recipe(algorithm=AIPOConfig(reward_columns=["ranked"])),
    [
        Stage("short", nothing, ["completion"]),
        Stage("judge", nothing, ["completion"], ["quality"]),
        Stage("rank", nothing, ["reward", "quality"], ["ranked"], per="group"),
    ],
)


def test_a_group_stage_gets_a_group_once_all_its_rollouts_are_ready() -> None:
    async def scenario() -> None:
        ledger = filled(4, OWN, rows_per_group=2)
        ledger.learn_rollouts([row(i) for i in range(4)])
        ledger.finish("score", range(4))
        ledger.finish("judge", [1, 2, 3])
        assert await take_items(ledger, "rank") == [(2, 3)]
        ledger.finish("judge", [0], [StageResult(row_id=0, numbers={"quality": 2.0})])
        assert await take_items(ledger, "rank") == [(0, 1)]
        group = ledger.entries[0].group
        assert group is not None
        assert group.numbers == {0: {"quality": 2.0}}
        ledger.finish("rank", range(4))
        assert await take_items(ledger, "settle") == [], "the filter is still to come"
        ledger.finish("short", range(4))
        assert await take_items(ledger, "settle") == [(0, 1), (2, 3)]

    asyncio.run(scenario())


def test_a_dropped_rollout_passes_no_further_stage_and_its_group_goes_on_without_it() -> None:
    async def scenario() -> None:
        ledger = filled(3, OWN, rows_per_group=3)
        ledger.learn_rollouts([row(i) for i in range(3)])
        assert await take_items(ledger, "judge") == [(0,), (1,), (2,)]
        ledger.finish("short", range(3), [StageResult(row_id=1, reason="rambling")])
        assert await take_items(ledger, "score") == [(0,), (2,)]
        ledger.finish("score", [0, 2])
        ledger.finish("judge", [0, 2])
        assert await take_items(ledger, "rank") == [], "judge has the dropped one still"
        failed = StageResult(row_id=1, status=StageStatus.HUNG, error="too slow")
        ledger.finish("judge", [1], [failed])
        assert await take_items(ledger, "rank") == [(0, 2)]
        ledger.finish("rank", [0, 2])
        assert await take_items(ledger, "settle") == [(0, 1, 2)]
        group = ledger.entries[0].group
        assert group is not None
        assert ledger.leave_out(group) == {"rambling": [1]}
        assert (group.row_ids, sorted(group.rollouts)) == ((0, 2), [0, 2])
        assert ledger.rows(Purpose.TRAIN) == [0, 2]

    asyncio.run(scenario())


def test_a_group_whose_rollouts_were_all_dropped_still_settles() -> None:
    async def scenario() -> None:
        ledger = filled(2, OWN, rows_per_group=2)
        ledger.learn_rollouts([row(0), row(1)])
        results = [StageResult(row_id=i, status=StageStatus.RAISED) for i in range(2)]
        await take_items(ledger, "short")
        ledger.finish("short", range(2), results)
        for stage in ("score", "judge", "rank"):
            assert await take_items(ledger, stage) == []
        assert await take_items(ledger, "settle") == [(0, 1)]
        group = ledger.entries[0].group
        assert group is not None
        assert group.dropped == {0: "short_failed", 1: "short_failed"}

    asyncio.run(scenario())


def test_what_is_put_back_is_taken_again_before_all_else() -> None:
    async def scenario() -> None:
        ledger = filled(6, OWN, rows_per_group=2)
        ledger.learn_rollouts([row(i) for i in range(6)])
        for stage in ("score", "judge"):
            ledger.finish(stage, range(6))
        taken = await ledger.take("rank", limit=4)
        assert taken == [(0, 1), (2, 3)]
        ledger.finish("short", [2], [StageResult(row_id=2, reason="short")])
        ledger.put_back("rank", taken)
        assert await take_items(ledger, "rank") == [(0, 1), (3,), (4, 5)]

    asyncio.run(scenario())


def test_a_row_id_in_use_is_refused() -> None:
    ledger = filled(1)
    with pytest.raises(ValueError, match="row id must be new, got 0"):
        ledger.add(request(0), PROMPT)
