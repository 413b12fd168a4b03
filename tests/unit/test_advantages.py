"""Advantages, reward shaping and the drop rule, against numbers worked by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algorithms.advantages import (
    drop_reason,
    group_advantages,
    overlong_penalty,
    shaped_rewards,
)
from llamarl.config import (
    AIPOConfig,
    CISPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    PPOConfig,
    ReinforceConfig,
    RLOOConfig,
)
from llamarl.types import Score, ScoreStatus

NONE = ReinforceConfig(advantage="none", drop_equal_rewards=True)


def scores(*statuses: ScoreStatus) -> list[Score]:
    return [Score(row_id=i, status=status, reward=1.0) for i, status in enumerate(statuses)]


def test_mean_baseline():
    assert group_advantages([1, 0, 0, 1], AIPOConfig()) == (0.5, -0.5, -0.5, 0.5)
    assert group_advantages([3, 0, 0, 0], AIPOConfig()) == (2.25, -0.75, -0.75, -0.75)


def test_mean_std_baseline_divides_by_the_population_deviation():
    # mean 3, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    std = math.sqrt(3.5)
    expected = (-2 / std, -1 / std, 0, 3 / std)
    assert group_advantages([1, 2, 3, 6], GRPOConfig()) == pytest.approx(expected, rel=1e-5)


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert group_advantages([1, 2, 6], RLOOConfig()) == pytest.approx((-3, -1.5, 4.5))


def test_without_baseline_the_advantage_is_the_reward():
    assert group_advantages([1, 0.25], NONE) == (1, 0.25)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_leave_one_out_equals_a_naive_loop(rewards):
    naive = [
        reward - math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1)
        for i, reward in enumerate(rewards)
    ]
    assert group_advantages(rewards, RLOOConfig()) == pytest.approx(naive, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.randoms())
def test_advantages_follow_their_rollouts_when_the_group_is_shuffled(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    for config in (AIPOConfig(), GRPOConfig(), RLOOConfig(), NONE):
        plain = group_advantages(rewards, config)
        shuffled = group_advantages([rewards[i] for i in order], config)
        assert shuffled == tuple(plain[i] for i in order)


def test_equal_rewards_give_exact_zeros_whatever_the_rounding():
    for config in (AIPOConfig(), GRPOConfig(), RLOOConfig()):
        assert group_advantages([0.1] * 3, config) == (0.0,) * 3


def test_impossible_groups_are_refused():
    with pytest.raises(ValueError, match="must have at least 2 rewards, got 1"):
        group_advantages([1.0], RLOOConfig())
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([1.0, math.nan], AIPOConfig())


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(10, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0)],
)
def test_overlong_penalty_falls_linearly_over_the_last_20_of_100_tokens(num_tokens, expected):
    assert overlong_penalty(num_tokens, 100, 20) == pytest.approx(expected)
    assert overlong_penalty(num_tokens, 100, 0) == 0


def test_shaped_rewards_subtract_the_penalty_before_the_baseline():
    config = DAPOConfig(overlong_penalty_tokens=20)
    assert shaped_rewards([1, 1, 0], [50, 90, 100], 100, config) == pytest.approx((1, 0.5, -1))


@pytest.mark.parametrize("status", [ScoreStatus.RAISED, ScoreStatus.HUNG, ScoreStatus.INVALID])
def test_one_failed_reward_drops_the_group(status):
    group = scores(ScoreStatus.OK, status, ScoreStatus.OK)
    assert drop_reason(group, [1, math.nan, 0], AIPOConfig()) == "failed_reward"
    keep_equal = AIPOConfig(drop_equal_rewards=False)
    assert drop_reason(group, [1, math.nan, 1], keep_equal) == "failed_reward"


def test_a_failed_reward_that_is_a_zero_keeps_the_group():
    group = scores(ScoreStatus.OK, ScoreStatus.HUNG)
    assert drop_reason(group, [1, 0], AIPOConfig()) is None


def test_equal_rewards_drop_the_group_only_where_configured():
    group = scores(ScoreStatus.OK, ScoreStatus.OK)
    assert drop_reason(group, [1, 1], AIPOConfig()) == "equal_rewards"
    assert drop_reason(group, [1, 0], AIPOConfig()) is None
    assert drop_reason(group, [1, 1], AIPOConfig(drop_equal_rewards=False)) is None


@pytest.mark.parametrize(
    ("config", "drops"),
    [
        (AIPOConfig(), True),
        (DAPOConfig(), True),
        (CISPOConfig(), True),
        (GRPOConfig(), False),
        (DrGRPOConfig(), False),
        (RLOOConfig(), False),
        (ReinforceConfig(), False),
        (PPOConfig(), False),
        (GSPOConfig(), False),
    ],
)
def test_groups_of_equal_rewards_are_filtered_where_the_paper_does_so(config, drops):
    reason = drop_reason(scores(ScoreStatus.OK, ScoreStatus.OK), [1, 1], config)
    assert (reason is not None) == drops


def test_equal_rewards_without_baseline_are_dropped_only_if_they_are_zero():
    group = scores(ScoreStatus.OK)
    assert drop_reason(group, [1], NONE) is None
    assert drop_reason(group, [0], NONE) == "equal_rewards"


@pytest.mark.parametrize(
    ("firsts", "rewards", "reason"),
    [
        ([1, 1], [1, 1], "solved"),
        ([1, 1], [0.5, 0.5], "solved"),  # weights and other parts may lower the reward
        ([1, 0.5], [0.5, 0.5], "equal_rewards"),
        ([0, 0], [0, 0], "equal_rewards"),
        ([1, 1], [1, 0.5], None),  # a length penalty still tells them apart
    ],
)
def test_a_group_of_full_marks_alone_is_dropped_as_solved(firsts, rewards, reason):
    group = [
        Score(row_id=i, status=ScoreStatus.OK, reward=reward, parts={"exact": first, "format": 0})
        for i, (first, reward) in enumerate(zip(firsts, rewards, strict=True))
    ]
    assert drop_reason(group, rewards, AIPOConfig()) == reason


def test_advantages_load_no_torch():
    code = "import llamarl.algorithms.advantages, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
