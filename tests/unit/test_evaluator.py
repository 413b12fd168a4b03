"""What an evaluation refuses, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llamarl.experience.graph import SCORE, make_graph
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.ledger import Ledger
from llamarl.types import (
    REWARD,
    Evaluation,
    FinishReason,
    Outcome,
    Prompt,
    Request,
    RolloutInfo,
    Sampling,
    StageResult,
    StageStatus,
    VersionSpan,
)
from tests.unit.planner_recipes import make_recipe


class FakeGenerator:
    """Writes, or gives up, each rollout at once, and has it scored."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.version_of: Callable[[int], int] = lambda number: 3
        self.is_lost: Callable[[int], bool] = lambda number: False
        self.score: Callable[[int], StageResult] = lambda number: StageResult(
            row_id=number, numbers={REWARD: 1.0}, parts={"exact": 1.0}, correct=True
        )

    async def submit(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            is_lost = self.is_lost(number)
            span = VersionSpan(version=self.version_of(number), num_tokens=4)
            row = RolloutInfo(
                row_id=request.row_id,
                num_prompt_tokens=2,
                num_tokens=0 if is_lost else 4,
                spans=() if is_lost else (span,),
                finish_reason=FinishReason.ABORTED if is_lost else FinishReason.STOP,
            )
            self.ledger.learn_rollouts([row])
            if not is_lost:
                self.ledger.finish(SCORE, [request.row_id], [self.score(request.row_id)])

    async def collect(self) -> list[RolloutInfo]:
        return []

    async def abort_requests(self, row_ids: list[int]) -> None: ...


class FakeStorage:
    """Remembers what was retired."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}

    async def write(self, *args: object) -> None: ...

    async def read(self, row_ids: list[int], names: list[str]) -> dict[str, list[object]]:
        return {}

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        self.outcomes |= dict.fromkeys(row_ids, outcome)


class Setting:
    """An evaluator of four prompts among fakes."""

    def __init__(self) -> None:
        self.ledger = Ledger(make_graph(make_recipe()))
        self.generator, self.storage = FakeGenerator(self.ledger), FakeStorage()
        self.evaluator = Evaluator(
            prompts=[Prompt(prompt_id=i, text="", token_ids=(1, i)) for i in range(4)],
            sampling=Sampling(max_tokens=4),
            seed=0,
            generator=self.generator,
            ledger=self.ledger,
            storage=self.storage,  # type: ignore[arg-type]
            rows_per_replica=3,
        )

    def evaluate(self) -> Evaluation | None:
        return asyncio.run(self.evaluator.evaluate(3, (10, 11, 12, 13)))


def test_a_token_of_another_version_ends_the_run() -> None:
    setting = Setting()
    setting.generator.version_of = lambda number: 4 if number == 2 else 3
    with pytest.raises(RuntimeError, match=r"evaluation of version 3 met tokens of \[4\]"):
        setting.evaluate()


def test_failed_rewards_alone_end_the_run() -> None:
    setting = Setting()
    setting.generator.score = lambda row_id: StageResult(
        row_id=row_id, status=StageStatus.RAISED, error="no sympy"
    )
    with pytest.raises(RuntimeError, match="every reward of the evaluation failed: no sympy"):
        setting.evaluate()


def test_a_failed_reward_counts_as_wrong_and_is_counted() -> None:
    rewards = {10: 1.0, 11: 1.0, 13: 0.5}

    def score(row_id: int) -> StageResult:
        if row_id not in rewards:
            return StageResult(row_id=row_id, status=StageStatus.HUNG, error="too slow")
        reward = rewards[row_id]
        return StageResult(row_id=row_id, numbers={REWARD: reward}, correct=reward == 1)

    setting = Setting()
    setting.generator.score = score
    result = setting.evaluate()
    assert result is not None
    assert (result.accuracy, result.reward) == (0.5, 0.625)
    assert (result.num_prompts, result.num_failed) == (4, 1)
    outcomes = setting.storage.outcomes
    assert [outcomes[row_id]["correct"] for row_id in (10, 11, 12, 13)] == [1, 1, 0, 0]


def test_there_is_no_result_without_all_prompts_and_the_next_version_is_due() -> None:
    setting = Setting()
    setting.generator.is_lost = lambda number: number == 1
    assert setting.evaluate() is None
    assert not setting.ledger.entries
    outcomes = setting.storage.outcomes
    assert [outcomes[row_id] for row_id in (10, 11, 12, 13)] == [{"outcome": "unused"}] * 4
    assert setting.evaluator.num_replicas == 2
    assert setting.evaluator.version == -1
    assert setting.evaluator.is_due(4, last=9)
    setting.generator.is_lost = lambda number: False
    assert setting.evaluate() is not None
    assert not setting.evaluator.is_due(4, last=9)


def test_without_any_rollout_there_is_no_result() -> None:
    setting = Setting()
    setting.generator.is_lost = lambda number: True
    assert setting.evaluate() is None
    assert not setting.ledger.entries
