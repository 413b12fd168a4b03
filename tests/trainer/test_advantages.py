"""Advantages, reward shaping and the drop rule, against numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import AlgorithmConfig
from llamarl.core.groups import Dropped, Kept
from llamarl.core.records import (
    REWARD,
    EpisodeState,
    StageResult,
    StageStatus,
    TurnResult,
    conversation_row,
)
from llamarl.trainer.advantages import ADVANTAGES, filter_group, overlong_penalty
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.losses.cispo import CISPOConfig
from llamarl.trainer.losses.clip import DAPOConfig, DrGRPOConfig, GRPOConfig, PPOConfig
from llamarl.trainer.losses.gspo import GSPOConfig
from llamarl.trainer.losses.reinforce import ReinforceConfig, RLOOConfig
from tests.fakes import group_of, stopped

NONE = ReinforceConfig(advantage="none", filters=["equal_rewards"])
mean, mean_std, leave_one_out = (ADVANTAGES[n] for n in ("mean", "mean_std", "leave_one_out"))


def decide(
    rewards: list[float],
    config: AlgorithmConfig,
    firsts: list[float] | None = None,
    lengths: list[int] | None = None,
    observed: list[int] | None = None,
) -> Kept | Dropped:
    """What becomes of a group with these rewards; `firsts` are what its first function gave,
    `lengths` the tokens of its rollouts of at most 100 that the model wrote, and `observed` those
    beside them."""
    rows = {i: stopped(i, (0, (lengths or [1] * 9)[i])) for i in range(len(rewards))}
    rows = {
        i: replace(row, num_tokens=row.num_tokens + (observed or [0] * 9)[i])
        for i, row in rows.items()
    }
    scores = {
        i: StageResult(
            row_id=i,
            status=StageStatus.RAISED if math.isnan(reward) else StageStatus.OK,
            numbers={REWARD: reward},
            parts={"exact": first, "format": 0.0},
            correct=first >= 1,
        )
        for i, (reward, first) in enumerate(zip(rewards, firsts or [0.0] * 9, strict=False))
    }
    group = group_of(*rows, rollouts=rows, scores=scores)
    verdict = filter_group(group, max_tokens=100, config=config)
    assert group.advantages == (), "nothing is changed"
    return verdict


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("none", [1, 0.25], [1, 0.25]),
        ("mean", [3, 0, 0, 0], [2.25, -0.75, -0.75, -0.75]),
        # The variance of the population is (4 + 1 + 0 + 9) / 4.
        ("mean_std", [1, 2, 3, 6], [each / math.sqrt(3.5) for each in (-2, -1, 0, 3)]),
    ],
)
def test_each_baseline_gives_the_numbers_worked_by_hand(name, rewards, expected):
    assert ADVANTAGES[name](rewards) == pytest.approx(expected, rel=1e-5)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_leave_one_out_equals_a_naive_loop(rewards):
    naive = [
        reward - math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1)
        for i, reward in enumerate(rewards)
    ]
    assert leave_one_out(rewards) == pytest.approx(naive, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12), st.randoms())
def test_advantages_follow_their_rollouts_when_the_group_is_shuffled(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    for advantages in ADVANTAGES.values():
        plain = advantages(rewards)
        assert advantages([rewards[i] for i in order]) == [plain[i] for i in order]


def test_equal_rewards_give_exact_zeros_whatever_the_rounding():
    for advantages in (mean, mean_std, leave_one_out):
        assert advantages([0.1] * 3) == [0.0] * 3


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(10, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0)],
)
def test_overlong_penalty_falls_linearly_over_the_last_20_of_100_tokens(num_tokens, expected):
    assert overlong_penalty(num_tokens, 100, 20) == pytest.approx(expected)
    assert overlong_penalty(num_tokens, 100, 0) == 0


def test_the_overlong_penalty_counts_before_the_baseline_and_behind_the_filters():
    config = DAPOConfig(overlong_penalty_tokens=20, advantage="mean")
    found = decide([1, 1, 0], config, lengths=[50, 90, 100])
    assert found.advantages == pytest.approx((5 / 6, 2 / 6, -7 / 6))
    lengths = [10, 20, 80, 96]
    assert decide([0] * 4, config, lengths=lengths) == Dropped("equal_rewards")
    assert decide([1] * 4, config, [1] * 4, lengths) == Dropped("solved")
    unfiltered = replace(config, filters=[])
    found = decide([1] * 4, unfiltered, lengths=lengths)
    assert found.advantages == pytest.approx((0.2, 0.2, 0.2, -0.6))


def test_the_overlong_penalty_of_an_episode_counts_what_its_limit_counts():
    config = DAPOConfig(overlong_penalty_tokens=20, advantage="mean")
    found = decide([1, 1, 0], config, lengths=[50, 30, 24], observed=[0, 60, 76])
    assert found == decide([1, 1, 0], config, lengths=[50, 90, 100])
    assert found.advantages == pytest.approx((5 / 6, 2 / 6, -7 / 6))


def test_one_failed_reward_drops_the_group():
    for config in (AIPOConfig(), AIPOConfig(filters=[])):
        assert decide([1, math.nan, 1], config) == Dropped("failed_reward")


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
    assert isinstance(decide([1, 1], config), Dropped if drops else Kept)


def test_equal_rewards_without_baseline_are_dropped_only_if_they_are_zero():
    assert decide([1], NONE) == Kept((1.0,))
    assert decide([0], NONE) == Dropped("equal_rewards")


@pytest.mark.parametrize(
    ("firsts", "rewards", "reason"),
    [
        ([1, 1], [1, 1], "solved"),
        ([1, 1], [0.5, 0.5], "solved"),  # weights and other parts may lower the reward
        ([1, 0.5], [0.5, 0.5], "equal_rewards"),
        ([0, 0], [0, 0], "equal_rewards"),
        ([1, 1], [1, 0.5], None),  # a length penalty still makes them differ
    ],
)
def test_a_group_of_correct_rollouts_alone_is_dropped_as_solved(firsts, rewards, reason):
    verdict = decide(rewards, AIPOConfig(), firsts)
    assert verdict == (Dropped(reason) if reason else Kept((0.25, -0.25)))


def test_a_conversation_with_a_reward_of_its_own_is_compared_as_its_episode_would_be() -> None:
    own = (None, 0.0, 3.0)
    episode = TurnResult(row_id=0, attempt=0, state=EpisodeState.DONE, reward=1.0, own_rewards=own)
    rows = {i: stopped(i, (0, 4)) for i in range(3)}
    rows[0] = replace(rows[0], episode=episode)
    scores = {
        i: StageResult(row_id=i, numbers={REWARD: 2 * r}, parts={"environment": r})
        for i, r in enumerate([1.0, 0.0, 0.5])
    }
    group = group_of(*rows, rollouts=rows, scores=scores)
    for config, others in (
        (RLOOConfig(), lambda reward: 2 * reward - (0.0 + 1.0) / 2),
        (GRPOConfig(), lambda reward: mean_std([2 * reward, 0.0, 1.0])[0]),
        (AIPOConfig(), lambda reward: mean([2 * reward, 0.0, 1.0])[0]),
        (AIPOConfig(advantage="gdpo"), lambda reward: 2 * mean_std([reward, 0.0, 0.5])[0]),
    ):
        functions = [("environment", 2.0)]
        kept = filter_group(group, max_tokens=100, config=config, functions=functions)
        assert isinstance(kept, Kept)
        assert kept.advantages[0] == pytest.approx(others(1.0))
        found = {conversation_row(0, 1): others(0.0), conversation_row(0, 2): others(3.0)}
        assert kept.own_advantages == pytest.approx(found)
    equal = {i: replace(score, numbers={REWARD: 2.0}) for i, score in scores.items()}
    group = group_of(*rows, rollouts=rows, scores=equal)
    functions = [("environment", 2.0)]
    assert isinstance(
        filter_group(group, max_tokens=9, config=AIPOConfig(), functions=functions), Kept
    )


def test_the_longest_conversation_of_an_episode_may_be_too_long() -> None:
    further = tuple(stopped(conversation_row(0, k), (0, n)) for k, n in ((1, 95), (2, 20)))
    rows = {0: replace(stopped(0, (0, 10)), conversations=further), 1: stopped(1, (0, 10))}
    scores = {i: StageResult(row_id=i, numbers={REWARD: 1.0}) for i in rows}
    group = group_of(*rows, rollouts=rows, scores=scores)
    config = AIPOConfig(overlong_penalty_tokens=10, filters=[])
    kept = filter_group(group, max_tokens=100, config=config)
    assert kept == Kept((-0.25, 0.25)), "5 of 10 tokens, less the mean"
