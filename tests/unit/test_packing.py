"""What the trainer relies on in `pack`: nothing lost, equal counts, budget, balance, order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llamarl.data.packing import pack

batches = given(
    lengths=st.lists(st.integers(1, 60), max_size=50),
    num_ranks=st.integers(1, 5),
    budget=st.integers(1, 120),
)


def test_packing_of_a_small_batch_is_the_one_worked_by_hand():
    # 9 to rank 0; 4, 4 and 3 to rank 1 (loads 9 and 0, 4, 8); 4+4 fill the budget, 3 is alone.
    assert pack([3, 9, 4, 4], 2, 8) == (((1,), ()), ((2, 3), (0,)))


def test_no_rollouts_are_no_micro_batches_on_every_rank():
    assert pack([], 3, 8) == ((), (), ())


@batches
def test_every_rollout_is_in_exactly_one_micro_batch(lengths, num_ranks, budget):
    assignment = pack(lengths, num_ranks, budget)
    packed = [position for rank in assignment for batch in rank for position in batch]
    assert sorted(packed) == list(range(len(lengths)))


@batches
def test_all_ranks_have_equally_many_micro_batches(lengths, num_ranks, budget):
    assignment = pack(lengths, num_ranks, budget)
    assert len(assignment) == num_ranks
    assert len({len(rank) for rank in assignment}) == 1
    assert not assignment[0] or any(rank[-1] for rank in assignment)


@batches
def test_only_a_single_rollout_may_exceed_the_budget(lengths, num_ranks, budget):
    for rank in pack(lengths, num_ranks, budget):
        for batch in rank:
            assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1


@batches
def test_rank_loads_differ_by_at_most_the_longest_rollout(lengths, num_ranks, budget):
    assignment = pack(lengths, num_ranks, budget)
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in assignment]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@batches
def test_a_rank_walks_its_rollouts_from_long_to_short_without_needless_cuts(
    lengths, num_ranks, budget
):
    for rank in pack(lengths, num_ranks, budget):
        walked = [lengths[i] for batch in rank for i in batch]
        assert walked == sorted(walked, reverse=True)
        full = [batch for batch in rank if batch]
        assert rank[: len(full)] == tuple(full)
        for batch, following in itertools.pairwise(full):
            assert sum(lengths[i] for i in batch) + lengths[following[0]] > budget
