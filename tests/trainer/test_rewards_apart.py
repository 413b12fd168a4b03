"""`algorithm.advantage=gdpo`: each reward is normalised by itself, as GDPO's formulas say in numpy;
and what of a scored group is a reward of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import AlgorithmConfig
from llamarl.core.groups import Dropped, Kept, Verdict
from llamarl.core.records import REWARD, StageResult
from llamarl.trainer.advantages import apart, filter_group, mean_std, over_deviation
from llamarl.trainer.losses.clip import GRPOConfig
from llamarl.trainer.packing import make_batch
from tests.fakes import group_of, stopped

FUNCTIONS = [("exact", 1.0), ("format", 0.25)]
SIZE, MAX_TOKENS = 4, 10
rewards_of_batch = st.lists(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=SIZE, max_size=SIZE),
        min_size=3,
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


def as_the_paper(batch: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Eq. 4 to 6 from rewards [groups, rewards, rollouts], with the deviation over n."""
    centred = batch - batch.mean(2, keepdims=True)
    each = centred / (batch.std(2, keepdims=True) + 1e-6)
    summed = (weights[None, :, None] * each).sum(1)
    return (summed - summed.mean()) / (summed.std() + 1e-6)


@given(batch=rewards_of_batch)
def test_advantages_of_a_batch_are_the_paper_s(batch):
    weights = [1.0, 0.3, -2.0]
    groups = [apart(list(zip(weights, group, strict=True))) for group in batch]
    got = over_deviation([advantage for group in groups for advantage in group])
    want = as_the_paper(np.array(batch), np.array(weights)).ravel()
    assert got == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_rewards_that_are_equal_in_sum_differ_apart():
    exact, form = [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    assert mean_std([a + b for a, b in zip(exact, form, strict=True)])[:2] == [0, 0]
    assert apart([(1.0, exact), (0.5, form)]) == pytest.approx([0.5, -0.5, 1.5, -1.5], rel=1e-5)


def test_a_batch_without_a_signal_has_no_advantage():
    assert over_deviation([0.0, 0.0]) == [0.0, 0.0]
    assert over_deviation([]) == []


def decide(
    exact: list[float], form: list[float], lengths: list[int] | None = None, **fields: object
) -> Verdict:
    """What becomes of a group of which the two functions gave this; rollout i also has the number
    i of a stage of the recipe's own. NaN: the reward failed, and counts as 0."""
    config: AlgorithmConfig = GRPOConfig(advantage="gdpo", **fields)
    rows = {i: stopped(i, (0, length)) for i, length in enumerate(lengths or [1] * len(exact))}
    scores = {}
    for i, (a, b) in enumerate(zip(exact, form, strict=True)):
        parts = {} if math.isnan(a) else {"exact": a, "format": b}
        numbers = {REWARD: 0.0 if math.isnan(a) else a + 0.25 * b}
        scores[i] = StageResult(row_id=i, numbers=numbers, parts=parts)
    group = group_of(*rows, rollouts=rows, scores=scores, numbers={i: {"rank": i} for i in rows})
    return filter_group(group, max_tokens=MAX_TOKENS, config=config, functions=FUNCTIONS)


def kept(*advantages: float) -> Kept:
    return Kept(pytest.approx(advantages, rel=1e-5, abs=1e-9))


def test_each_function_is_a_reward_with_its_weight():
    assert decide([1, 0], [0, 1]) == kept(0.75, -0.75)
    assert decide([1, 0], [1, 1]) == kept(1, -1)
    assert decide([100, 0], [0, 1]) == kept(0.75, -0.75), "its scale plays no part"


def test_columns_of_the_recipe_s_own_stages_are_rewards_too():
    columns = {"reward_columns": ["reward", "rank"], "reward_column_weights": [2.0, 0.5]}
    assert decide([1, 0], [0, 1], **columns) == kept(2 * 0.75 - 0.5, 0.5 - 2 * 0.75)
    columns = {"reward_columns": ["rank"], "reward_column_weights": [1.0]}
    assert decide([1, 0], [0, 1], **columns) == kept(-1, 1)


def test_the_overlong_penalty_is_a_reward_of_its_own():
    penalty = {"overlong_penalty_tokens": 5}
    assert decide([1, 0], [0, 0], [10, 1], **penalty) == kept(0, 0)
    assert decide([1, 0], [0, 0], [4, 1], **penalty) == kept(1, -1)


def test_a_failed_reward_that_counts_as_zero_is_zero_in_each():
    assert decide([1, math.nan], [1, math.nan]) == kept(1.25, -1.25)


def test_groups_that_differ_in_one_reward_alone_are_not_of_equal_rewards():
    drop = {"filters": ["equal_rewards"]}
    assert decide([1, 0.75], [0, 1], **drop) == kept(0.75, -0.75)
    assert decide([1, 1], [1, 1], **drop) == Dropped("equal_rewards")


def test_without_parts_the_reward_is_one():
    rows = {i: stopped(i, (0, 1)) for i in (0, 1)}
    scores = {i: StageResult(row_id=i, numbers={REWARD: float(i)}) for i in rows}
    group = group_of(*rows, rollouts=rows, scores=scores)
    config = GRPOConfig(advantage="gdpo")
    verdict = filter_group(group, max_tokens=MAX_TOKENS, config=config, functions=FUNCTIONS)
    assert verdict == kept(-1, 1)


def test_a_batch_is_divided_by_its_deviation_and_its_groups_stay_as_they_are():
    groups = [
        group_of(*rows, rollouts={i: stopped(i, (0, 1)) for i in rows}, advantages=advantages)
        for rows, advantages in (((0, 1), (3.0, -3.0)), ((2, 3), (1.0, -1.0)))
    ]
    batch = make_batch(groups, 0, 0, num_ranks=1, tokens_per_micro_batch=9, scale=over_deviation)
    root = math.sqrt(5)
    want = [3 / root, -3 / root, 1 / root, -1 / root]
    assert [row.advantage for row in batch.rows] == pytest.approx(want, rel=1e-5)
    assert [row.row_id for row in batch.rows] == [0, 1, 2, 3]
    assert groups[0].advantages == (3.0, -3.0)
