"""What an evaluation refuses, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from llamarl.groups import Evaluation
from llamarl.loop.engines import Engines, Unobserved
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.nearby_units import RowIds
from llamarl.loop.rollouts import Rollouts
from llamarl.types import (
    REWARD,
    FinishReason,
    Prompt,
    Request,
    RolloutInfo,
    Sampling,
    StageResult,
    StageStatus,
)
from tests.fakes import RolloutSetting, stopped

ROWS = (10, 11, 12, 13)


class EvaluatorSetting(RolloutSetting):
    """An evaluator of four prompts among fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.version_of: Callable[[int], int] = lambda row_id: 3
        self.is_lost: Callable[[int], bool] = lambda row_id: False
        self.score: Callable[[int], StageResult] = lambda row_id: StageResult(
            row_id=row_id, numbers={REWARD: 1.0}, correct=1.0 == 1.0
        )
        self.dispatch.stop = self.stop
        self.stages["score"].result = lambda row_id: self.score(row_id)
        self.held: list[tuple[int, int | None]] = []
        self.evaluator = self.make_evaluator()

    def make_evaluator(self) -> Evaluator:
        engines = Engines(
            rules=None,  # type: ignore[arg-type]
            gate=SimpleNamespace(allocate_rows=RowIds(10, 1).take),  # type: ignore[arg-type]
            dispatch=self.dispatch,  # type: ignore[arg-type]
            rollouts=self.rollouts,
            trainer=None,
            publisher=SimpleNamespace(hold=self.hold),  # type: ignore[arg-type]
            observer=Unobserved(),
            version=3,
        )
        return Evaluator(
            prompts=[Prompt(prompt_id=i, text="", token_ids=(1, i)) for i in range(4)],
            sampling=Sampling(max_tokens=4),
            seed=0,
            engines=engines,
            rows_per_replica=3,
        )

    def hold(self, version: int, at_most: int | None) -> nullcontext[None]:
        self.held.append((version, at_most))
        return nullcontext()

    def stop(self, request: Request) -> RolloutInfo:
        row_id = request.row_id
        if self.is_lost(row_id):
            return stopped(row_id, reason=FinishReason.ABORTED)
        return stopped(row_id, (self.version_of(row_id), 2))

    def evaluate(self) -> Evaluation | None:
        found: list[Evaluation | None] = []

        async def work(rollouts: object) -> None:
            found.append(await self.evaluator.evaluate(3))

        self.run(work)
        return found[0]


def test_a_token_of_another_version_ends_the_run() -> None:
    setting = EvaluatorSetting()
    setting.version_of = lambda row_id: 4 if row_id == 12 else 3
    with pytest.raises(RuntimeError, match=r"evaluation of version 3 met tokens of \[4\]"):
        setting.evaluate()


def test_failed_rewards_alone_end_the_run() -> None:
    setting = EvaluatorSetting()
    setting.score = lambda row_id: StageResult(
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
        return StageResult(row_id=row_id, numbers={REWARD: reward}, correct=reward == 1.0)

    setting = EvaluatorSetting()
    setting.score = score
    result = setting.evaluate()
    assert result is not None
    assert (result.accuracy, result.reward) == (0.5, 0.625)
    assert (result.num_prompts, result.num_failed) == (4, 1)
    outcomes = setting.storage.outcomes
    assert [outcomes[row_id]["correct"] for row_id in ROWS] == [1, 1, 0, 0]


def test_there_is_no_result_without_all_prompts_and_the_next_version_is_due() -> None:
    setting = EvaluatorSetting()
    setting.is_lost = lambda row_id: row_id == 11

    async def work(rollouts: Rollouts) -> None:
        evaluator = setting.evaluator
        assert await evaluator.evaluate(3) is None
        assert not rollouts.open
        outcomes = setting.storage.outcomes
        assert [outcomes[row_id] for row_id in ROWS] == [{"outcome": "unused"}] * 4
        assert setting.held == [(3, 2)], "as many replicas as run all prompts at once"
        assert evaluator.version == -1
        assert evaluator.is_due(4, last=9)
        setting.is_lost = lambda row_id: False
        assert await evaluator.evaluate(3, is_last=True) is not None
        assert setting.held[-1] == (3, None)
        assert not evaluator.is_due(4, last=9)

    setting.run(work)


def test_without_any_rollout_there_is_no_result() -> None:
    setting = EvaluatorSetting()
    setting.is_lost = lambda row_id: True
    assert setting.evaluate() is None
    assert not setting.rollouts.open
