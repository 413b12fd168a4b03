"""What an evaluation refuses and counts, what samples say of a model, which version is best."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.balance import RowIds
from llamarl.controller.engines import Engines
from llamarl.controller.evaluation import Evaluator
from llamarl.controller.rollouts import Rollouts
from llamarl.core.config import EmbeddedConfig, EvaluationConfig
from llamarl.core.errors import TaskError
from llamarl.core.faces import RunObserver
from llamarl.core.groups import Evaluation, HeldOutResult
from llamarl.core.records import (
    REWARD,
    TOKEN_VERSIONS,
    FinishReason,
    Prompt,
    Request,
    RolloutInfo,
    StageResult,
    StageStatus,
)
from llamarl.metrics.estimates import (
    effective_count,
    interval,
    majority_at,
    pass_at,
    share_of,
    with_margin,
)
from llamarl.metrics.held_out import (
    RESULTS_FILE,
    BestVersion,
    append_results,
    best_version,
    evaluation_scalars,
    is_sound,
    summed_up,
)
from llamarl.metrics.tensorboard import description
from llamarl.planner.simulation.simulated_run import make_inputs
from llamarl.storage.archive import make_record
from llamarl.trainer.packing import MiniBatches
from tests.fakes import KL, RolloutSetting, stopped
from tests.json_lines import read_lines
from tests.planner.planner_recipes import LLAMA, make_recipe

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
                steps=MiniBatches(groups_per_step=1),
            ),
            dispatch=self.dispatch,  # type: ignore[arg-type]
            rollouts=self.rollouts,
            trainer=None,
            publisher=SimpleNamespace(hold=self.hold),  # type: ignore[arg-type]
            observer=RunObserver(),
            version=3,
        )
        prompts = [Prompt(prompt_id=i, text="", token_ids=(1, i)) for i in range(4)]
        return Evaluator(
            engines=engines,
            config=make_recipe(generator=EmbeddedConfig(max_num_seqs=3)),
            inputs=make_inputs([], KL, LLAMA, prompts),
        )

    def ask(self, prompts: Sequence[Prompt] | None = None, **fields: Any) -> None:
        """Evaluate these prompts as `evaluation.*` with these fields says."""
        before = self.evaluator
        self.evaluator = replace(
            before,
            config=replace(before.config, evaluation=EvaluationConfig(**fields)),
            inputs=replace(before.inputs, held_out=before.prompts if prompts is None else prompts),
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
    setting.ask(
        [Prompt(prompt_id=i, text="", token_ids=(i,), held_out=name) for name, i in asked],
        rollouts_per_prompt=4,
        temperature=1.0,
        at_k=[1, 2, 4],
        sets={"easy": "x", "hard": "y"},
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
    setting.ask(setting.evaluator.prompts[:2], rollouts_per_prompt=2, temperature=1.0, at_k=[2])
    result = setting.evaluate()
    assert result is not None
    append_results(tmp_path, result)
    append_results(tmp_path, replace(result, version=4))
    assert "HeldOutResult" not in repr(result), "however many prompts it has, it is short to print"
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
    setting.ask(rollouts_per_prompt=2, temperature=1.0, at_k=[2])
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
    setting = EvaluatorSetting()
    begun = setting.make_evaluator()
    setting.ask(every_steps=every)
    evaluator = replace(setting.evaluator, best=BestVersion(metric="x"), version=first)
    gate: Any = evaluator.engines.gate
    gate.steps = MiniBatches(groups_per_step=1, num_passes=2, first_version=first)
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
        assert best.version == (3 if is_known_before else -1), (
            "it is neither wanted nor the last one"
        )
        evaluator.note_saved(3)
        evaluator.note_saved(3)
        assert (best.version, best.num_since) == (3, 0)

    setting.run(work)


def evaluation(version: int, *correct: bool) -> Evaluation:
    results = [
        HeldOutResult(
            held_out="sums" if place % 2 else "drill",
            prompt_id=place,
            correct=(is_correct,),
            rewards=(float(is_correct),),
            answers=(None,),
            num_tokens=(3,),
            is_truncated=(False,),
            shares={"accuracy": float(is_correct), "pass_at_1": float(is_correct)},
        )
        for place, is_correct in enumerate(correct)
    ]
    return summed_up(version, results, [1], ["sums", "drill"])


def test_the_earliest_of_equal_versions_is_the_best_and_version_0_is_none() -> None:
    best = BestVersion(metric="accuracy", patience=2)
    best.add(evaluation(0, True, True))
    assert not best.is_known
    assert best.state() == {}
    for version, correct in ((1, (True, False)), (2, (False, True)), (3, (True, True))):
        best.add(evaluation(version, *correct))
    assert (best.version, best.value, best.num_since, best.why_over) == (3, 1.0, 0, "")
    for version in (4, 5):
        assert not best.why_over
        best.add(evaluation(version, True, True))
    assert best.why_over == (
        "evaluation/accuracy was not above the 1 of version 3 in 2 evaluations"
    )


def test_it_may_be_judged_by_one_set() -> None:
    best = BestVersion(metric="sums/pass_at_1")
    best.add(evaluation(1, False, True))
    best.add(evaluation(2, True, False))
    assert (best.version, best.num_since) == (1, 1)
    assert not best.why_over, "without patience it waits for ever"


def test_it_goes_on_from_its_state_unless_the_metric_is_another() -> None:
    best = BestVersion(metric="accuracy", patience=9)
    best.add(evaluation(1, True, False))
    best.add(evaluation(2, False, False))
    saved = json.loads(json.dumps(best.state()))
    assert is_sound(saved, most=2)
    assert not is_sound(saved, most=0)
    assert best_version("accuracy", 9, saved) == best
    assert best_version("accuracy", 1, saved).why_over, "less patience than before"
    assert best_version("reward", 9, saved) == BestVersion(metric="reward", patience=9)


def test_a_metric_that_evaluations_turn_out_not_to_have_is_one_line() -> None:
    best = BestVersion(metric="maj_at_1")
    with pytest.raises(TaskError, match=r"^checkpoint.best must be a metric .* got maj_at_1$"):
        best.add(evaluation(1, True, True))


SAMPLES = st.lists(
    st.tuples(st.none() | st.integers(0, 3), st.booleans()), min_size=1, max_size=7
).flatmap(lambda samples: st.tuples(st.just(samples), st.integers(1, len(samples))))
Samples = tuple[list[tuple[int | None, bool]], int]


@given(SAMPLES)
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_right_one(
    given_: Samples,
) -> None:
    samples, k = given_
    choices = [*combinations([is_correct for _, is_correct in samples], k)]
    expected = sum(map(any, choices)) / len(choices)
    num_correct = sum(is_correct for _, is_correct in samples)
    assert pass_at(k, len(samples), num_correct) == pytest.approx(expected)


def vote(samples: list[tuple[int | None, bool]], chosen: tuple[int, ...]) -> float:
    """Whether the most frequent answer of the chosen ones is right: of several, on average."""
    counts = Counter(samples[i][0] for i in chosen if samples[i][0] is not None)
    most = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == most]
    right = [
        np.mean([is_correct for answer, is_correct in samples if answer == winner])
        for winner in winners
    ]
    return float(np.mean(right)) if right else 0.0


@given(SAMPLES)
def test_maj_at_k_is_the_mean_vote_over_all_choices_of_k_samples(given_: Samples) -> None:
    samples, k = given_
    choices = [*combinations(range(len(samples)), k)]
    expected = sum(vote(samples, chosen) for chosen in choices) / len(choices)
    answers, correct = zip(*samples, strict=True)
    assert majority_at(k, answers, correct) == pytest.approx(expected)


def test_many_samples_keep_their_digits() -> None:
    answers, correct = [*range(128)] * 2, [True] * 128 + [False] * 128
    assert majority_at(1, answers, correct) == pytest.approx(0.5)
    assert majority_at(256, answers, correct) == pytest.approx(0.5)


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_one_sample_per_prompt_gives_wilsons_interval(correct: list[bool]) -> None:
    found = share_of([*map(float, correct)], [1] * len(correct))
    share = sum(correct) / len(correct)
    assert found == pytest.approx((share, *interval(share, len(correct))))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20).flatmap(
        lambda counts: st.tuples(
            st.just(counts), st.tuples(*(st.floats(0, 1).map(lambda x, n=n: x * n) for n in counts))
        )
    )
)
def test_samples_say_at_least_as_much_as_prompts_and_at_most_what_they_are(given_) -> None:
    counts, sums = given_
    assert len(counts) - 1e-9 <= effective_count(sums, counts) <= sum(counts) + 1e-9
    value, low, high = share_of(sums, counts)
    assert 0.0 <= low <= value + 1e-9
    assert value <= high + 1e-9
    assert high <= 1.0


def test_alike_samples_of_a_prompt_count_once_and_unlike_ones_each() -> None:
    assert effective_count([4, 0] * 50, [4] * 100) == pytest.approx(100, rel=0.02)
    assert effective_count([2] * 100, [4] * 100) == 100, "no spread at all says nothing of it"
    spread = [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4] * 10  # 4 tosses of a coin
    assert effective_count(spread, [4] * 160) == pytest.approx(640, rel=0.01)


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "alpha", "beta"),
    [
        (100, 1, 2.0, 1.0),
        (100, 4, 0.5, 0.5),
        (100, 4, 5.0, 5.0),
        (50, 8, 0.3, 3.0),
        (60, 4, 8, 0.5),
    ],
)
def test_the_interval_holds_the_true_accuracy_95_times_in_100(
    num_prompts: int, num_samples: int, alpha: float, beta: float
) -> None:
    """Prompts whose pass rates come from a beta distribution; without their clusters (as of
    independent samples) the interval would hold it far less often where prompts differ."""
    rng, num_runs, held, naive = np.random.default_rng(7), 1000, 0, 0
    true = alpha / (alpha + beta)
    for _ in range(num_runs):
        sums = rng.binomial(num_samples, rng.beta(alpha, beta, num_prompts)).tolist()
        value, low, high = share_of(sums, [num_samples] * num_prompts)
        held += low <= true <= high
        low, high = interval(value, num_samples * num_prompts)
        naive += low <= true <= high
    assert held / num_runs >= 0.92
    assert num_samples == 1 or naive < held


def test_the_margin_is_the_longer_side() -> None:
    assert with_margin(share_of([1.0] * 9 + [0.0], [1] * 10)) == "90.0% +-30.4"
