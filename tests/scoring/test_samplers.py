"""Samplers: what each takes, one answer for all processes of a consumer, and wrong samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.errors import TaskError
from llamarl.core.extensions import load
from llamarl.scoring.samplers import (
    SAMPLERS,
    RankAware,
    Ranks,
    ReadyItem,
    Sample,
    admission,
    draw,
    group_complete,
    make_sampler,
    token_balanced,
)


def rollout(row_id: int, group_id: int, num_tokens: int = 9, group_size: int = 2) -> ReadyItem:
    return ReadyItem(
        item_id=row_id,
        group_id=group_id,
        group_size=group_size,
        num_prompt_tokens=1,
        num_tokens=num_tokens,
    )


def rollouts(num_groups: int, lengths: Callable[[], int] = lambda: 9) -> list[ReadyItem]:
    """Two of each group."""
    return [rollout(i, i // 2, lengths()) for i in range(2 * num_groups)]


def test_admission_takes_the_oldest_or_waits() -> None:
    ready = rollouts(3)
    assert admission(ready, 3) == ([0, 1, 2], [0, 1, 2])
    assert admission(ready, 7) == ([], [])


def test_group_complete_passes_over_groups_with_rollouts_under_way() -> None:
    ready = [rollout(0, 0), *rollouts(4)[2:]]
    assert group_complete(ready, 4) == ([2, 3, 4, 5], [2, 3, 4, 5])
    assert group_complete(ready, 8) == ([], []), "three groups are ready, not four"
    assert group_complete([*rollouts(1), rollout(9, 5, group_size=3)], 2) == ([0, 1], [0, 1])
    ready = [*rollouts(1), *(rollout(i, 7, group_size=3) for i in (5, 6, 7))]
    assert group_complete(ready, 4)[0] == [0, 1], "the next group does not fit"
    settled = replace(rollout(3, 3, group_size=4), num_rollouts=4)
    assert group_complete([settled], 1) == ([3], [3]), "complete by itself"


def test_token_balanced_gives_each_rank_as_many_rollouts_and_nearly_the_same_cost() -> None:
    drawn = random.Random(3)
    ready = rollouts(64, lambda: int(50 * drawn.lognormvariate(0, 1)))
    ranks = Ranks(num_data_ranks=4, attention_cost=0.001)
    taken, consumed = token_balanced(ready, 96, ranks)
    assert sorted(taken) == [*range(96)] == sorted(consumed), "the oldest ones"

    def uneven(item_ids: list[int]) -> float:
        lengths = [1 + ready[i].num_tokens for i in item_ids]
        costs = [length + 0.001 * length**2 for length in lengths]
        loads = [sum(costs[start : start + 24]) for start in range(0, 96, 24)]
        return max(loads) / min(loads) - 1

    assert uneven(list(taken)) < 0.02 < 0.2 < uneven([*range(96)])
    assert token_balanced(ready, 132, ranks) == ([], [])
    with pytest.raises(ValueError, match="count must be a multiple of the 4 data ranks, got 6"):
        token_balanced(ready, 6, ranks)


@given(
    name=st.sampled_from([*SAMPLERS]),
    num_data_ranks=st.integers(1, 3),
    num_peers=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_however_rollouts_arrive_and_ranks_ask_each_is_in_one_share_that_all_peers_get(
    name: str, num_data_ranks: int, num_peers: int, seed: int
) -> None:
    chosen = random.Random(seed)
    ranks = Ranks(num_data_ranks=num_data_ranks, num_peers=num_peers)
    shared = RankAware(make_sampler(name, {}, ranks), ranks)
    askers = [(rank, peer) for rank in range(num_data_ranks) for peer in range(num_peers)]
    coming = rollouts(24)
    chosen.shuffle(coming)
    ready: list[ReadyItem] = []
    shares: dict[tuple[int, int], list[list[int]]] = {asker: [] for asker in askers}
    turns = [chosen.choice(askers) for _ in range(100)] + 24 * askers
    for rank, peer in turns:
        num_new = chosen.randint(0, 1) if len(coming) > 24 else len(coming)
        ready += [coming.pop() for _ in range(num_new)]
        ready.sort(key=lambda item: item.item_id)
        batch_index = len(shares[rank, peer])
        share, consumed = shared.sample(
            ready, 2, data_rank=rank, peer=peer, batch_index=batch_index
        )
        ready = [item for item in ready if item.item_id not in consumed]
        if share is not None:
            assert len(share) <= 2
            shares[rank, peer].append(share)
    for rank, peer in askers:
        assert shares[rank, peer] == shares[rank, 0]
    for batch in zip(*(shares[rank, 0] for rank in range(num_data_ranks)), strict=True):
        sizes = set(map(len, batch))
        is_even = len(sizes) == 1 or sizes == {0, 1}  # of few, some ranks get none
        assert is_even or name == "group_complete"
    given_out = [i for rank in range(num_data_ranks) for share in shares[rank, 0] for i in share]
    assert sorted(given_out) == [*range(48)]


def test_a_process_may_ask_again_until_all_have_their_answer() -> None:
    shared = RankAware(admission, Ranks(num_peers=2))
    ready = rollouts(2)
    first = shared.sample(ready, 2, data_rank=0, peer=0, batch_index=0)
    assert first == ([0, 1], [0, 1])
    again = shared.sample(ready[2:], 2, data_rank=0, peer=0, batch_index=0)
    assert again == ([0, 1], []), "it is consumed once"
    assert shared.sample([], 2, data_rank=0, peer=1, batch_index=0) == ([0, 1], [])
    with pytest.raises(RuntimeError, match="batch 0 must not be asked for again: all have it"):
        shared.sample(ready, 2, data_rank=0, peer=0, batch_index=0)


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (lambda ready, count: [0, 1], "be two lists of item ids, those taken and those .*, got"),
        (lambda ready, count: None, "be two lists of item ids, .*, got None"),
        (lambda ready, count: ([0.5], []), r"be two lists of item ids, .*, got \(\[0.5\], \[\]\)"),
        (lambda ready, count: ([0, 99], []), "take only what is ready, got 99"),
        (lambda ready, count: ([0, 1], [2]), "consume only what it takes, got 2"),
        (lambda ready, count: ([0, 0], [0]), "take an item once, got 0 more often"),
        (lambda ready, count: ([0, 1], [1, 1]), "consume an item once, got 1 more often"),
        (lambda ready, count: ([0, 1, 2, 3], []), "take 1 to 3 items or none, got 4"),
    ],
)
def test_a_wrong_sample_is_one_line(sample: Callable[..., Any], line: str) -> None:
    with pytest.raises(TaskError, match=r"^what sample of task\.py returns must " + line) as error:
        draw(sample, rollouts(4), 3)
    assert "\n" not in str(error.value)


def test_a_sampler_that_raises_is_named_with_its_line() -> None:
    task = load({"task.py": "def sample(ready, count):\n    return ready[0].length\n"}, ["sample"])
    with pytest.raises(TaskError, match=r"^sample of task\.py must not raise, .*\.py, line 2: ret"):
        draw(make_sampler("task", task), rollouts(1), 1)


def test_a_sampler_may_take_fewer_or_none_unless_its_consumer_needs_them_all() -> None:
    def one(ready: object, count: int) -> Sample:
        return [0], []

    def none(ready: object, count: int) -> Sample:
        return (), ()

    assert draw(one, rollouts(2), 3) == ([0], [])
    assert draw(none, rollouts(2), 3, at_least=3) == ([], [])
    with pytest.raises(TaskError, match="must take 3 items or none, got 1"):
        draw(one, rollouts(2), 3, at_least=3)
