"""The ledger hands each row to a stage once, whatever order columns become ready in."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.loop.ledger import Consumer, Ledger, loop_stages
from llamarl.planner.simulation import clock
from llamarl.types import (
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    FinishReason,
    Group,
    Prompt,
    Purpose,
    Request,
    RolloutInfo,
    Sampling,
    Score,
    ScoreStatus,
    VersionSpan,
)

PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1,))
COLUMNS = (RESPONSE_IDS, REWARD, REF_LOGPROBS)
NUM_ROWS = 12


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


def filled(num_rows: int = NUM_ROWS) -> Ledger:
    stages = loop_stages(has_reference=True)
    ledger = Ledger({name: replace(stage, pause_s=0.0) for name, stage in stages.items()})
    for row_id in range(num_rows):
        ledger.add(request(row_id), PROMPT)
    return ledger


async def take_all(ledger: Ledger, stage: str) -> list[int]:
    """Every row that is ready now."""
    taken: list[int] = []
    while True:
        try:
            taken += await asyncio.wait_for(ledger.take(stage, limit=3), 0.001)
        except TimeoutError:
            return taken


marks = st.permutations([(i, column) for i in range(NUM_ROWS) for column in COLUMNS])


@settings(max_examples=40, deadline=None)
@given(marks=marks, num_marked=st.integers(0, NUM_ROWS * len(COLUMNS)), chosen=st.randoms())
def test_a_stage_gets_exactly_the_rows_whose_columns_are_all_ready_and_each_once(
    marks: list[tuple[int, str]], num_marked: int, chosen: random.Random
) -> None:
    async def scenario() -> None:
        ledger = filled()
        ready: dict[int, set[str]] = {i: set() for i in range(NUM_ROWS)}
        taken: dict[str, list[int]] = {"score": [], "infer": [], "settle": []}
        for row_id, column in marks[:num_marked]:
            ready[row_id].add(column)
            for _ in range(chosen.randint(1, 2)):  # saying it twice changes nothing
                ledger.mark([row_id], column)
            if chosen.random() < 0.1:
                stage = chosen.choice(list(taken))
                taken[stage] += await take_all(ledger, stage)
        for stage, rows in taken.items():
            rows += await take_all(ledger, stage)
            needs = loop_stages(has_reference=True)[stage].needs
            assert sorted(rows) == [i for i in range(NUM_ROWS) if needs <= ready[i]]

    asyncio.run(scenario())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_takers=st.integers(2, 6))
def test_concurrent_takers_share_the_rows_without_a_double(seed: int, num_takers: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        ledger = filled(200)
        taken: list[int] = []

        async def consume() -> None:
            while True:
                rows = await ledger.take("score", limit=rng.randint(1, 9))
                await asyncio.sleep(0)
                taken.extend(rows)

        takers = [asyncio.create_task(consume()) for _ in range(num_takers)]
        order = rng.sample(range(200), 200)
        while order:
            size = rng.randint(1, 20)
            ledger.mark(order[:size], RESPONSE_IDS)
            del order[:size]
            await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        for taker in takers:
            taker.cancel()
        assert sorted(taken) == list(range(200))

    asyncio.run(scenario())


def test_a_stage_that_pauses_gets_what_came_meanwhile_together() -> None:
    async def scenario() -> None:
        ledger = Ledger({"score": Consumer(needs=frozenset({RESPONSE_IDS}), pause_s=5.0)})
        for row_id in range(4):
            ledger.add(request(row_id), PROMPT)
        ledger.mark([0], RESPONSE_IDS)
        assert await ledger.take("score") == [0]
        for row_id in (1, 2):
            ledger.mark([row_id], RESPONSE_IDS)
        assert await ledger.take("score", limit=1) == [1]
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert await ledger.take("score") == [2], "no pause while some are left"
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)

    clock.run(scenario())


def test_rows_are_taken_in_the_order_they_became_ready_and_at_most_limit_at_once() -> None:
    async def scenario() -> None:
        ledger = filled()
        ledger.mark([7, 2], RESPONSE_IDS)
        ledger.mark([5], RESPONSE_IDS)
        assert await ledger.take("score", limit=2) == [7, 2]
        assert await ledger.take("score", limit=2) == [5]

    asyncio.run(scenario())


def test_a_sleeping_taker_wakes_when_a_row_becomes_ready() -> None:
    async def scenario() -> None:
        ledger = filled()
        taking = asyncio.create_task(ledger.take("score"))
        await asyncio.sleep(0)
        assert not taking.done()
        ledger.mark([3], RESPONSE_IDS)
        assert await asyncio.wait_for(taking, 1) == [3]

    asyncio.run(scenario())


def test_a_forgotten_row_reaches_no_stage_and_later_marks_of_it_are_ignored() -> None:
    async def scenario() -> None:
        ledger = filled()
        ledger.mark([1, 2], RESPONSE_IDS)
        ledger.forget([1])
        ledger.mark([1], REWARD)
        assert await take_all(ledger, "score") == [2]
        assert ledger.rows(Purpose.TRAIN) == [i for i in range(NUM_ROWS) if i != 1]

    asyncio.run(scenario())


def test_evaluation_rows_are_scored_but_never_settled_or_inferred() -> None:
    async def scenario() -> None:
        ledger = filled(1)
        ledger.add(request(9, Purpose.EVALUATE), PROMPT)
        for column in COLUMNS:
            ledger.mark([0, 9], column)
        assert await take_all(ledger, "score") == [0, 9]
        assert await take_all(ledger, "settle") == [0]
        assert await take_all(ledger, "infer") == [0]
        assert ledger.rows(Purpose.EVALUATE) == [9]

    asyncio.run(scenario())


def test_an_evaluation_gets_a_rollout_once_it_is_scored_though_it_was_never_written() -> None:
    async def scenario() -> None:
        ledger = filled(0)
        for row_id in range(3):
            ledger.add(request(row_id, Purpose.EVALUATE), PROMPT)
        ledger.mark([0, 1], RESPONSE_IDS)
        assert await take_all(ledger, "evaluate") == []
        ledger.mark([1, 2], REWARD)
        assert await take_all(ledger, "evaluate") == [1, 2]

    asyncio.run(scenario())


def test_what_is_learnt_reaches_entry_group_and_stages_a_failed_score_too() -> None:
    async def scenario() -> None:
        ledger = Ledger({"settle": Consumer(needs=frozenset({RESPONSE_IDS, REWARD}))})
        group = Group(group_id=0, prompt=PROMPT, row_ids=(0, 1), min_version=0)
        for row_id in group.row_ids:
            ledger.add(request(row_id), PROMPT, group)
        good = Score(row_id=0, status=ScoreStatus.OK, reward=1.0)
        failed = Score(row_id=1, status=ScoreStatus.HUNG, error="too slow")
        ledger.learn_scores([failed, good])
        ledger.learn_rollouts([row(0), row(1)])
        assert group.rollouts == {0: row(0), 1: row(1)}
        assert group.scores == {0: good, 1: failed}
        assert (ledger.entries[1].rollout, ledger.entries[1].score) == (row(1), failed)
        assert await ledger.take("settle") == [0, 1]

    asyncio.run(scenario())


def test_a_row_id_in_use_is_refused() -> None:
    ledger = filled(1)
    with pytest.raises(ValueError, match="row id must be new, got 0"):
        ledger.add(request(0), PROMPT)
