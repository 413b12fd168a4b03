"""What the trainer relies on in `pack`: nothing lost, equal counts, budget, balance, order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import ClusterConfig, PlanConfig, TrainerConfig
from llamarl.core.partition import partition, partition_in_equal_counts
from llamarl.model.architecture import read_architecture
from llamarl.model.inventory import attention_cost
from llamarl.planner.law import hardware_costs
from llamarl.trainer.packing import pack
from tests.places import ROOT
from tests.unit.planner_recipes import LLAMA, make_recipe

ARCHITECTURE = ROOT / "recipes" / "llama31_8b_math" / "architecture"

batches = given(
    lengths=st.lists(st.integers(1, 60), max_size=50),
    num_ranks=st.integers(1, 5),
    budget=st.integers(1, 120),
)


def test_packing_of_a_small_batch_is_the_one_worked_by_hand():
    # 9 to rank 0; 4, 4 and 3 to rank 1 (loads 9 and 0, 4, 8); 4+4 fill the budget, 3 is alone.
    assert pack([3, 9, 4, 4], 2, 8) == (((1,), ()), ((2, 3), (0,)))


def test_a_round_is_spread_more_evenly_than_longest_first_would_if_it_then_fits():
    # Longest first: 8+5+4 and 7+6, 17 and 13 tokens; by differencing 7+5+4 and 8+6.
    assert pack([8, 7, 6, 5, 4], 2, 17) == (((1, 3, 4),), ((0, 2),))
    # Costs 17.5, 12, 4 and 1.5: without a limit 17.5 and 17.5, but then a rank has 7 tokens.
    assert pack([5, 4, 2, 1], 2, 7, attention_cost=0.5) == (((0,),), ((1, 2, 3),))
    assert pack([5, 4, 2, 1], 2, 6, attention_cost=0.5) == (((0, 3),), ((1, 2),))


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
def test_without_a_limit_costs_of_ranks_differ_by_at_most_the_costliest_rollout(
    lengths, num_ranks, budget
):
    costs = [length + length**2 / 20 for length in lengths]
    ranks = pack(lengths, num_ranks, 10**9, 1 / 20)
    sums = [sum(costs[i] for batch in rank for i in batch) for rank in ranks]
    assert max(sums) - min(sums) <= max(costs, default=0) + 1e-9


@batches
def test_a_later_round_has_no_rollout_for_which_an_earlier_one_had_room(lengths, num_ranks, budget):
    rounds = [
        [lengths[i] for batch in batches for i in batch]
        for batches in zip(*pack(lengths, num_ranks, budget), strict=True)
    ]
    for number, early in enumerate(rounds):
        for length in itertools.chain(*rounds[number + 1 :]):
            assert sum(early) > num_ranks * (budget - length)


@batches
def test_a_micro_batch_walks_its_rollouts_from_long_to_short(lengths, num_ranks, budget):
    for batch in itertools.chain(*pack(lengths, num_ranks, budget)):
        walked = [lengths[i] for i in batch]
        assert walked == sorted(walked, reverse=True)


@pytest.mark.parametrize("num_ranks", [4, 8, 64])
def test_with_long_tails_ranks_wait_less_for_the_slowest_than_if_balanced_as_a_whole(num_ranks):
    drawn, budget = random.Random(7), 32768
    square = attention_cost(read_architecture(ARCHITECTURE))
    lengths = [200 + min(16384, round(2000 * drawn.lognormvariate(0, 1.0))) for _ in range(1024)]
    costs = [length + square * length * length for length in lengths]
    packed = waits(pack(lengths, num_ranks, budget, square), costs)
    for whole in (partition(lengths, num_ranks), partition(costs, num_ranks)):
        assert packed < waits([cut(rank, lengths, budget) for rank in whole], costs) / 2


def cut(rank, lengths, budget):
    """A rank's rollouts, the longest first, in micro-batches of at most `budget` tokens."""
    batches, room = [], 0
    for i in sorted(rank, key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def waits(ranks, costs):
    """What all ranks wait for the slowest of each micro-batch, over the work of a rank."""
    rounds = itertools.zip_longest(*ranks, fillvalue=())
    slowest = sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)
    return slowest * len(ranks) / sum(costs) - 1


def test_attention_costs_about_as_much_as_in_the_forecasts():
    """The cost is arithmetic alone, as if every token had logits; the forecasts have a rate for
    each kind of work."""
    wide = replace(LLAMA, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32)
    wide = replace(wide, num_kv_heads=8, head_dim=128, vocab_size=128256)
    trainer = TrainerConfig(device="cuda", compute_dtype="bfloat16")
    recipe = make_recipe(trainer=trainer, cluster=ClusterConfig(), plan=PlanConfig(prompt_tokens=1))
    costs = hardware_costs(recipe, wide)
    assert 1 <= costs.square_s / costs.token_s / attention_cost(wide) < 2


@given(costs=st.lists(st.integers(0, 100), max_size=60), num_parts=st.integers(1, 9))
def test_a_partition_has_every_position_once_and_sums_no_further_apart_than_the_largest_cost(
    costs, num_parts
):
    parts = partition(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs, default=0)


@given(costs=st.lists(st.integers(0, 100), max_size=60), num_parts=st.integers(1, 9))
def test_parts_of_equal_counts_have_every_position_once(costs, num_parts):
    del costs[len(costs) // num_parts * num_parts :]
    parts = partition_in_equal_counts(costs, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // num_parts}


def test_partitions_of_small_examples_are_those_worked_by_hand():
    # 8 and 7 differ by 1, 6 and 5 by 1; 4 joins the 7, 11 and 8 differ by 3; 11+5 and 8+6.
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 4, 3], [0, 2]]
    # The 9 is alone until the others are full.
    assert partition_in_equal_counts([9, 4, 4, 3, 1, 1], 2) == [[0, 4, 5], [1, 2, 3]]
