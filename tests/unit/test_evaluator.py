"""What an evaluation refuses, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamarl.controller.balance import RowIds
from llamarl.controller.engines import Engines, Unobserved
from llamarl.controller.evaluation import Evaluator
from llamarl.controller.rollouts import Rollouts
from llamarl.core.groups import Evaluation, HeldOutResult, Share
from llamarl.core.records import (
    REWARD,
    TOKEN_VERSIONS,
    FinishReason,
    Prompt,
    Request,
    RolloutInfo,
    Sampling,
    StageResult,
    StageStatus,
)
from llamarl.metrics.held_out import RESULTS_FILE, BestVersion, append_results, evaluation_scalars
from llamarl.metrics.tensorboard import description
from llamarl.storage.archive import make_record
from tests.fakes import RolloutSetting, stopped
from tests.json_lines import read_lines

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
            rules=SimpleNamespace(make_record=make_record),  # type: ignore[arg-type]
            gate=SimpleNamespace(  # type: ignore[arg-type]
                allocate_rows=RowIds(10, 1).take,
                first_of_batch=lambda version: version,
                first_version=0,
            ),
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


def test_further_numbers_of_rewards_are_metrics_of_an_evaluation_and_stand_in_its_lines(
    tmp_path: Path,
) -> None:
    extra = {10: {"format": 1.0}, 11: {"format": 0.5, "steps": 3.0}}
    setting = EvaluatorSetting()
    setting.score = lambda row_id: StageResult(
        row_id=row_id, numbers={REWARD: 1.0}, correct=True, extra=extra.get(row_id, {})
    )
    result = setting.evaluate()
    assert result is not None
    found = {name: value for name, value in evaluation_scalars(result).items() if "extra" in name}
    assert found == {
        "evaluation/reward_extra/format": 0.75,
        "evaluation/reward_extra/steps": 3.0,
    }
    assert "held-out" in description("evaluation/reward_extra/format")
    append_results(tmp_path, result)
    lines = read_lines(tmp_path / RESULTS_FILE)
    assert [line.get("reward_extra") for line in lines] == [[extra[10]], [extra[11]], None, None]


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


def test_several_rollouts_of_prompts_of_several_sets_are_told_apart() -> None:
    setting = EvaluatorSetting()
    asked = [("easy", 1), ("easy", 2), ("hard", 1)]
    setting.evaluator = replace(
        setting.evaluator,
        prompts=[Prompt(prompt_id=i, text="", token_ids=(i,), held_out=name) for name, i in asked],
        num_rollouts=4,
        at_k=[1, 2, 4],
        sets=["easy", "hard"],
    )
    answers = {"easy 1": "aaab", "easy 2": "bbba", "hard 1": "ccdd"}  # a and c are right
    rows = {
        10 + place + 3 * i: f"{name} {number}"
        for i in range(4)
        for place, (name, number) in enumerate(asked)
    }

    def score(row_id: int) -> StageResult:
        answer = answers[rows[row_id]][(row_id - 10) // 3]
        is_right = answer in "ac"
        return StageResult(
            row_id=row_id, numbers={REWARD: float(is_right)}, correct=is_right, answer=ord(answer)
        )

    setting.score = score
    setting.storage.put({row_id: {TOKEN_VERSIONS: np.full(2, 3, np.int32)} for row_id in rows})
    result = setting.evaluate()
    assert result is not None
    assert setting.held == [(3, 4)], "12 rollouts, 3 at a replica"
    assert (result.num_prompts, result.num_rollouts, result.accuracy) == (3, 12, 0.5)
    seeds = {request.seed for request in setting.dispatch.asked}
    assert len(seeds) == 8, "by line and place"
    easy, hard = result.sets["easy"], result.sets["hard"]
    values = {name: share.value for name, share in easy.shares.items()}
    assert values == pytest.approx(
        {
            "accuracy": 0.5,
            "pass_at_1": 0.5,
            "pass_at_2": (1 + 0.5) / 2,
            "pass_at_4": 1.0,
            "maj_at_1": 0.5,
            "maj_at_2": (0.75 + 0.25) / 2,
            "maj_at_4": 0.5,
        }
    )
    assert hard.shares["maj_at_4"].value == 0.5, "two answers, as often"
    assert (easy.num_prompts, hard.num_prompts) == (2, 1)
    outcomes = [setting.storage.outcomes[row_id] for row_id in sorted(rows)]
    assert [each["held_out"] for each in outcomes] == ["easy", "easy", "hard"] * 4
    assert [each["correct"] for each in outcomes] == [1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0]


def test_each_prompt_under_each_version_is_a_line_of_evaluations_jsonl(tmp_path: Path) -> None:
    setting = EvaluatorSetting()
    setting.score = lambda row_id: StageResult(
        row_id=row_id, numbers={REWARD: 0.5}, answer=[7, 7, 9, None][row_id - 10]
    )
    setting.evaluator = replace(setting.evaluator, num_rollouts=2, at_k=[2])
    setting.evaluator.prompts = setting.evaluator.prompts[:2]
    result = setting.evaluate()
    assert result is not None
    append_results(tmp_path, result)
    append_results(tmp_path, replace(result, version=4))
    first, second, *later = read_lines(tmp_path / RESULTS_FILE)
    assert first == {
        "version": 3,
        "held_out": "",
        "prompt_id": 0,
        "accuracy": 0.0,
        "pass_at_2": 0.0,
        "maj_at_2": 0.0,
        "correct": [False, False],
        "rewards": [0.5, 0.5],
        "answers": [0, 1],
        "num_tokens": [2, 2],
        "is_truncated": [False, False],
    }
    assert second["answers"] == [0, None]
    assert [line["version"] for line in later] == [4, 4]


def test_without_answers_there_is_no_majority() -> None:
    setting = EvaluatorSetting()
    setting.evaluator = replace(setting.evaluator, num_rollouts=2, at_k=[2])
    result = setting.evaluate()
    assert result is not None
    assert [*result.shares] == ["accuracy", "pass_at_2"]


@pytest.mark.parametrize(
    ("first", "every", "last", "expected"),
    [
        (0, 3, 16, [4, 6, 10, 12, 16]),
        (0, 2, 6, [2, 4, 6]),
        (0, 1, 6, [2, 4, 6]),
        (3, 10, 45, [11, 21, 31, 41, 45]),
    ],
)
def test_what_may_be_the_best_is_evaluated_between_batches(
    first: int, every: int, last: int, expected: list[int]
) -> None:
    """Batches have two steps; the first one begins with version `first`."""
    begun = EvaluatorSetting().make_evaluator()
    evaluator = replace(begun, best=BestVersion(metric="x"), every_steps=every, version=first)
    gate: Any = evaluator.engines.gate
    gate.first_of_batch = lambda version: version - (version - first) % 2
    gate.first_version = first
    assert begun.is_wanted(first) is False, "no best one is asked for"
    assert first == 0 or evaluator.is_wanted(first), "its checkpoint is there"
    due, saved = [], []
    for version in range(first + 1, last + 1):
        if evaluator.is_due(version, last):
            due.append(version)
            evaluator = replace(evaluator, version=version)
        if version == last or evaluator.is_wanted(version):
            saved.append(version)
    assert due == saved == expected


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_version_that_is_saved_after_all_may_be_the_best(is_known_before: bool) -> None:
    best = BestVersion(metric="accuracy")
    setting = EvaluatorSetting()

    async def work(rollouts: Rollouts) -> None:
        evaluator = replace(setting.evaluator, best=best)
        if is_known_before:
            evaluator.note_saved(3)
        assert await evaluator.evaluate(3) is not None
        assert best.version == 3 * is_known_before, "it is neither wanted nor the last one"
        evaluator.note_saved(3)
        evaluator.note_saved(3)
        assert (best.version, best.num_since) == (3, 0)

    setting.run(work)


def test_an_evaluation_is_short_to_print_however_many_prompts_it_has() -> None:
    one = HeldOutResult(
        held_out="easy",
        prompt_id=7,
        correct=(True,),
        rewards=(1.0,),
        answers=(3,),
        num_tokens=(4,),
        is_truncated=(False,),
        shares={"accuracy": 1.0},
    )
    of_set = Evaluation(
        version=3,
        shares={"accuracy": Share(0.5, 0.4, 0.6)},
        reward=0.5,
        mean_tokens=4.0,
        truncated_share=0.0,
        num_prompts=1000,
        num_rollouts=1000,
        num_failed=0,
        results=(one,) * 1000,
    )
    found = replace(of_set, sets={"easy": of_set})
    assert len(repr(found)) < 1000
    assert "accuracy" in repr(found)
    assert len(found.results) == 1000
