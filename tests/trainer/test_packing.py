"""Batches of the trainer: packing, micro-batches, mini-batches and the learning rate of a step."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.batches import PartSize
from llamarl.core.config import ClusterConfig, PlanConfig, TrainerConfig
from llamarl.core.partition import partition, partition_in_equal_counts
from llamarl.core.records import PROMPT_IDS, RESPONSE_IDS, conversation_row
from llamarl.model.architecture import read_architecture
from llamarl.model.inventory import attention_cost
from llamarl.planner.law import hardware_costs
from llamarl.planner.simulation import clock
from llamarl.trainer.loss_inputs import LossInputs
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.packing import MiniBatches, make_batch, pack
from llamarl.trainer.passes import micro_batch
from llamarl.trainer.policy import learning_rate
from llamarl.trainer.policy_loss import LossMetrics, policy_loss, statistics
from tests.fakes import group_of, stopped
from tests.places import ROOT
from tests.planner.planner_recipes import LLAMA, make_recipe

ARCHITECTURE = ROOT / "recipes" / "llama31_8b_math" / "architecture"


def test_packing_of_a_small_batch_is_the_one_worked_by_hand():
    # 9 to rank 0; 4, 4 and 3 to rank 1 (loads 9 and 0, 4, 8); 4+4 fill the budget, 3 is alone.
    assert pack([3, 9, 4, 4], 2, 8) == (((1,), ()), ((2, 3), (0,)))
    assert pack([], 3, 8) == ((), (), ())


def test_a_round_is_spread_more_evenly_than_longest_first_would_if_it_then_fits():
    # Longest first: 8+5+4 and 7+6, 17 and 13 tokens; by differencing 7+5+4 and 8+6.
    assert pack([8, 7, 6, 5, 4], 2, 17) == (((1, 3, 4),), ((0, 2),))
    # Costs 17.5, 12, 4 and 1.5: without a limit 17.5 and 17.5, but then a rank has 7 tokens.
    assert pack([5, 4, 2, 1], 2, 7, attention_cost=0.5) == (((0,),), ((1, 2, 3),))
    assert pack([5, 4, 2, 1], 2, 6, attention_cost=0.5) == (((0, 3),), ((1, 2),))


@given(
    lengths=st.lists(st.integers(1, 60), max_size=50),
    num_ranks=st.integers(1, 5),
    budget=st.integers(1, 120),
)
def test_ranks_get_every_rollout_once_in_even_micro_batches(lengths, num_ranks, budget):
    assignment = pack(lengths, num_ranks, budget)
    packed = [position for rank in assignment for batch in rank for position in batch]
    assert sorted(packed) == list(range(len(lengths)))
    assert len(assignment) == num_ranks
    assert len({len(rank) for rank in assignment}) == 1
    assert not assignment[0] or any(rank[-1] for rank in assignment)
    for batch in itertools.chain(*assignment):
        walked = [lengths[i] for i in batch]
        assert sum(walked) <= budget or len(batch) == 1
        assert walked == sorted(walked, reverse=True), "from long to short"
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in assignment]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    rounds = [
        [lengths[i] for batch in batches for i in batch]
        for batches in zip(*assignment, strict=True)
    ]
    for number, early in enumerate(rounds):
        for length in itertools.chain(*rounds[number + 1 :]):
            assert sum(early) > num_ranks * (budget - length), "an earlier round had room for it"
    costs = [length + length**2 / 20 for length in lengths]
    without_limit = pack(lengths, num_ranks, 10**9, 1 / 20)
    sums = [sum(costs[i] for batch in rank for i in batch) for rank in without_limit]
    assert max(sums) - min(sums) <= max(costs, default=0) + 1e-9


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
def test_partitions_are_complete_and_no_further_apart_than_the_largest_cost(costs, num_parts):
    parts = partition(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs, default=0)
    del costs[len(costs) // num_parts * num_parts :]
    parts = partition_in_equal_counts(costs, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // num_parts}


def test_partitions_of_small_examples_are_those_worked_by_hand():
    # 8 and 7 differ by 1, 6 and 5 by 1; 4 joins the 7, 11 and 8 differ by 3; 11+5 and 8+6.
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 4, 3], [0, 2]]
    # The 9 is alone until the others are full.
    assert partition_in_equal_counts([9, 4, 4, 3, 1, 1], 2) == [[0, 4, 5], [1, 2, 3]]


COLUMNS = {
    PROMPT_IDS: [np.array([1, 2, 3], np.int32), np.array([9], np.int32)],
    RESPONSE_IDS: [np.array([4, 5], np.int32), np.array([6, 7, 8], np.int32)],
}


def test_packed_rollouts_predict_their_responses_and_nothing_else():
    packed = micro_batch(COLUMNS, [1, 0])
    assert packed.token_ids.tolist() == [9, 6, 7, 1, 2, 3, 4]
    assert packed.targets.tolist() == [6, 7, 8, 2, 3, 4, 5]
    assert packed.packing.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.targets[packed.chosen].tolist() == [6, 7, 8, 4, 5]
    assert packed.response_lengths == (3, 2)


def test_an_empty_micro_batch_feeds_one_token_and_predicts_none():
    packed = micro_batch(COLUMNS, [])
    assert packed.packing.positions.tolist() == [0]
    assert len(packed.token_ids) == len(packed.targets) == 1
    assert len(packed.chosen) == 0


def outputs(trainer, generator, weights):
    num = len(trainer)
    inputs = LossInputs(
        trainer_logprobs=torch.tensor(trainer, dtype=torch.float32),
        generator_logprobs=torch.tensor(generator, dtype=torch.float32),
        advantages=torch.ones(num),
        weights=torch.tensor(weights, dtype=torch.float32),
        entropy=torch.full((num,), 0.5),
        rollout_index=torch.zeros(num, dtype=torch.int64),
        rollout_lengths=torch.tensor([num]),
    )
    return policy_loss(inputs, AIPOConfig(rho=2.0))


def test_statistics_do_not_depend_on_how_tokens_are_cut_into_ranks_and_micro_batches():
    trainer, generator, weights = [-1.0, -1.0, -1.0], [-1.0, -3.0, -2.0], [1.0, 1.0, 0.0]
    whole, first, second = LossMetrics(), LossMetrics(), LossMetrics()
    whole.add(outputs(trainer, generator, weights), 3)
    first.add(outputs(trainer[:1], generator[:1], weights[:1]), 1)
    second.add(outputs(trainer[1:2], generator[1:2], weights[1:2]), 1)
    second.add(outputs(trainer[2:], generator[2:], weights[2:]), 1)
    together = statistics(whole.vector()[None], 3.0)
    vectors = torch.stack([first.vector(), LossMetrics().vector(), second.vector()])
    assert statistics(vectors, 3.0) == pytest.approx(together)
    assert together["ratio_mean"] == pytest.approx((1 + np.exp(2)) / 2)
    assert together["ratio_max"] == pytest.approx(np.exp(2))
    assert together["ratio_clipped_share"] == 0.5
    assert together["trained_tokens"] == 2
    assert together["masked_tokens"] == 1
    assert together["entropy"] == 0.5
    assert together["loss"] == pytest.approx((1 + 2) / 3)


NUM_BATCHES = 4

shapes = st.builds(
    MiniBatches,
    groups_per_step=st.integers(1, 4),
    number=st.integers(1, 4),
    num_passes=st.integers(1, 4),
    looks_ahead=st.booleans(),
    first_version=st.integers(0, 9),
)


def uses(shape: MiniBatches) -> list[tuple[int, list[int]]]:
    """(version, numbers of the groups that its step uses) of the first batches, written out."""
    found: list[tuple[int, list[int]]] = []
    version, group = shape.first_version, 0
    for _ in range(NUM_BATCHES):
        mini_batches = []
        for _ in range(shape.number):
            mini_batches.append([*range(group, group + shape.groups_per_step)])
            group += shape.groups_per_step
        for _ in range(shape.num_passes):
            for groups in mini_batches:
                found.append((version, groups))
                version += 1
    return found


@given(shapes, st.data())
def test_every_number_is_that_of_the_list_of_steps(shape: MiniBatches, data: st.DataObject) -> None:
    steps = uses(shape)
    last_use = {group: version for version, groups in steps for group in groups}
    first_use = {group: version for version, groups in reversed(steps) for group in groups}
    per_batch = shape.number * shape.num_passes
    assert (shape.steps_per_batch, shape.groups_per_batch * NUM_BATCHES) == (
        per_batch,
        len(last_use),
    )
    for i, (version, groups) in enumerate(steps):
        first = steps[i - i % per_batch][0]
        in_batch = {g for start, used in steps for g in used if first <= start < first + per_batch}
        assert shape.first_of_batch(version) == first
        assert min(in_batch) + shape.first_group(version) == groups[0]
        assert shape.is_last_pass(version) == (last_use[groups[0]] == version)
        assert shape.num_used_up(version) == sum(last < version for last in last_use.values())
        later = {g for g in in_batch if first_use[g] > version}
        is_first = shape.looks_ahead and version == first
        assert shape.num_ahead(version) == (len(later) if is_first else 0)
        open_ = {g for g in in_batch if last_use[g] >= version}
        needed = open_ if shape.looks_ahead else open_ - later
        assert shape.num_needed(version) == len(needed)

    versions = [shape.last_use(group) for group in sorted(last_use)]
    assert versions == [last_use[group] for group in sorted(last_use)] == sorted(versions)
    for group, version in last_use.items():
        assert shape.num_used_up(version) <= group < shape.num_used_up(version + 1)
    num_groups = data.draw(st.integers(0, NUM_BATCHES * shape.groups_per_batch - 1))
    for i, (_, groups) in enumerate(steps):
        rest_of_batch = steps[i : i - i % shape.steps_per_batch + shape.steps_per_batch]
        needed = [g for _, each in rest_of_batch for g in each] if shape.looks_ahead else groups
        if max(needed) >= num_groups:
            assert shape.num_steps(num_groups) == i
            return


def rates(num_steps, **fields):
    config = TrainerConfig(lr=8.0, **fields)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_grows_to_the_peak_and_constant_stays_there():
    assert rates(6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_a_share_of_warm_up_is_one_of_the_steps_of_the_run_rounded_up():
    assert rates(6, warmup_share=0.5) == rates(6, warmup_steps=3)
    assert rates(10, warmup_share=0.01, schedule="linear") == rates(
        10, warmup_steps=1, schedule="linear"
    )
    assert rates(4, warmup_share=1.0) == [2, 4, 6, 8]
    with pytest.raises(
        ValueError, match=r"warmup_share must be 0 with trainer\.warmup_steps.*0\.1"
    ):
        TrainerConfig(warmup_steps=3, warmup_share=0.1)


def test_linear_falls_by_equal_amounts_and_its_last_step_still_learns():
    assert rates(4, schedule="linear") == [8, 6, 4, 2]
    assert rates(4, schedule="linear", min_lr_share=0.5) == [8, 7, 6, 5]
    assert rates(6, warmup_steps=2, schedule="linear") == [4, 8, 8, 6, 4, 2]


def test_cosine_is_half_way_in_the_middle_and_its_last_step_still_learns():
    assert rates(4, schedule="cosine") == pytest.approx([8, 6.828427, 4, 1.171573])
    assert rates(2, schedule="cosine", min_lr_share=0.25) == pytest.approx([8, 5])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (1, 1), (2, 5), (3, 2), (200, 10)])
def test_no_step_of_any_run_has_learning_rate_zero(schedule, num_steps, warmup_steps):
    values = rates(num_steps, schedule=schedule, warmup_steps=warmup_steps)
    assert all(0 < value <= 8 for value in values)
    assert num_steps > 1 or values == [8]
    floor = TrainerConfig(lr=8.0, schedule=schedule, min_lr_share=0.25)
    after = [learning_rate(floor, step, 5) for step in (5, 9)]
    assert after == ([8, 8] if schedule == "constant" else [2, 2]), "after the planned end"


START_S, TOKEN_S = 0.1, 1e-4
WANTED = 9000  # tokens: then START_S is a tenth of the time


def make(**fields: object) -> PartSize:
    return PartSize(config=TrainerConfig(groups_per_step=64, **fields))  # type: ignore[arg-type]


def feed(size: PartSize, num_parts: int, late_share: float = 0.0, seed: int = 0) -> None:
    """Parts of 1,000 to 20,000 tokens, 5 % noise; some are held up for half a second."""
    rng = random.Random(seed)
    for _ in range(num_parts):
        num_tokens = rng.randint(1000, 20_000)
        seconds = (START_S + TOKEN_S * num_tokens) * rng.uniform(0.95, 1.05)
        size.learn(num_tokens, seconds + 0.5 * (rng.random() < late_share))


def test_before_a_measurement_a_part_fills_one_micro_batch_of_every_data_rank() -> None:
    size = make(num_ranks=8, tensor_parallel=2, tokens_per_micro_batch=500)
    assert size.least(64) == (1, 2000)


@pytest.mark.parametrize(
    ("parts", "num_tokens"),
    [
        ([(n, START_S + TOKEN_S * n) for n in (1000, 10_000)], WANTED),  # a tenth is overhead
        ([(n, TOKEN_S * n) for n in (1000, 2000, 3000)], 0),  # no overhead: a group at a time
        ([(1000, 1.0), (1000, 2.0), (1000, 3.0)], 500),  # parts of one size teach nothing
        ([(1000, 1.0), (2000, 1.0)], 500),  # nor do times that do not grow with size
        ([(1000, 2.0), (2000, 1.0), (3000, 0.5)], 500),
    ],
)
def test_times_of_parts_give_the_size(parts: list[tuple[int, float]], num_tokens: int) -> None:
    size = make(tokens_per_micro_batch=500)
    for part in parts:
        size.learn(*part)
    assert size.least(64) == (1, num_tokens)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_parts_that_are_held_up_move_the_size_little(seed: int) -> None:
    size = make()
    feed(size, 40, late_share=0.2, seed=seed)
    assert WANTED / 2 < size.num_tokens < WANTED * 2


def test_the_size_follows_a_trainer_whose_costs_change() -> None:
    size = make()
    feed(size, 40)
    for num_tokens in range(1000, 31_000, 1000):
        size.learn(num_tokens, START_S / 10 + TOKEN_S * num_tokens)
    assert size.num_tokens == pytest.approx(WANTED / 10, rel=0.01)


def test_a_part_is_at_most_half_a_step_so_that_sizes_differ_and_the_first_is_not_counted() -> None:
    async def train(size: PartSize, num_tokens: int, seconds: float) -> None:
        num_prompt = num_tokens // 4
        rollout = stopped(0, (0, num_tokens - num_prompt), num_prompt_tokens=num_prompt)
        with size.timed([group_of(0, rollouts={0: rollout})]):
            await asyncio.sleep(seconds)

    async def scenario() -> None:
        size = make(tokens_per_micro_batch=500)
        await train(size, 1000, 99.0)
        await train(size, 2000, 1.2)
        assert size.take_metrics() == {"parts/number": 2, "parts/least_tokens": 500}
        await train(size, 1000, 1.1)  # a = 1 s, b = 0.1 ms: 90,000 tokens would saturate it
        await train(size, 3000, 1.3)
        assert size.take_metrics() == {"parts/number": 2, "parts/least_tokens": 2000}

    clock.run(scenario())


def test_whole_batches_learn_nothing() -> None:
    batch = make(parts="batch")
    feed(batch, 10)
    assert [batch.least(missing) for missing in (64, 5)] == [(64, 0), (5, 0)]


def test_each_conversation_is_a_row_with_its_episode_s_advantage_unless_it_has_its_own() -> None:
    further = tuple(
        stopped(conversation_row(0, k), (k, n), num_prompt_tokens=5) for k, n in ((1, 7), (2, 2))
    )
    rows = {0: replace(stopped(0, (0, 3)), conversations=further), 1: stopped(1, (0, 4))}
    own = {conversation_row(0, 2): 0.5}
    group = group_of(*rows, rollouts=rows, advantages=(1.0, -1.0), own_advantages=own)
    batch = make_batch([group], 3, 1, num_ranks=1, tokens_per_micro_batch=100, scale=doubled)
    found = [(row.row_id, row.num_tokens, row.num_in_rollout, row.advantage) for row in batch.rows]
    assert found == [
        (0, 3, 12, 2.0),
        (conversation_row(0, 1), 7, 12, 2.0),
        (conversation_row(0, 2), 2, 12, 1.0),
        (1, 4, 4, -2.0),
    ]
    assert sorted(batch.assignment[0][0]) == [0, 1, 2, 3]


def doubled(advantages: Sequence[float]) -> list[float]:
    return [2 * advantage for advantage in advantages]
