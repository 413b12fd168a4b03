"""Costs from hardware, against figures worked out by hand from published peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.config.plan_keys import PlanConfig
from llamarl.planner.hardware import EFFICIENCY, GPUS
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import simulate
from tests.unit.planner_recipes import LLAMA, make_recipe

H100 = GPUS["H100-80GB"]
LLAMA_8B = replace(
    LLAMA,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
)
ROW_BYTES = 4096 * 2


def make_gpu_recipe(
    *, trainer: TrainerConfig | None = None, num_generator_ranks: int = 1
) -> Config:
    return make_recipe(
        generator=EmbeddedConfig(
            device="cuda", dtype="bfloat16", num_ranks=num_generator_ranks, max_num_seqs=4
        ),
        trainer=trainer or TrainerConfig(device="cuda", compute_dtype="bfloat16"),
        weights=WeightsConfig(transport="collective"),
        cluster=ClusterConfig(num_hosts=32),
    )


def make_trainer(**sizes: int) -> TrainerConfig:
    return TrainerConfig(device="cuda", compute_dtype="bfloat16", **sizes)


def decode_sums_rate(num_ranks: int) -> float:
    """Bytes per second of the generator's all-reduces, out of the seconds they take."""
    costs = hardware_costs(make_gpu_recipe(num_generator_ranks=num_ranks), LLAMA_8B)
    moved = 2 * LLAMA_8B.num_layers * 2 * (num_ranks - 1) / num_ranks * ROW_BYTES
    return moved / costs.decode_row_s


def test_tensor_parallelism_within_a_host_gets_the_links() -> None:
    assert decode_sums_rate(8) == pytest.approx(EFFICIENCY * H100.link_bytes_per_s)


def test_tensor_parallelism_over_hosts_gets_the_cards_of_all_its_ranks_on_a_host() -> None:
    assert decode_sums_rate(16) == pytest.approx(EFFICIENCY * 8 * H100.card_bytes_per_s)


def test_sharding_and_tensor_parallelism_over_the_same_hosts_get_the_same_network() -> None:
    gathered = sum_of_parameters() * 2 * 15 / 16
    rate = gathered / gather_s(make_trainer(num_ranks=16))
    assert rate == pytest.approx(decode_sums_rate(16), rel=1e-6)


def sum_of_parameters() -> int:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    return 32 * layer + 2 * 128256 * 4096 + 4096


def gather_s(trainer: TrainerConfig) -> float:
    """Seconds of one gather of all weights: what `forward` repeats more than `backward`."""
    kept, gathered = (
        hardware_costs(
            make_gpu_recipe(trainer=replace(trainer, reshard_after=reshard_after)), LLAMA_8B
        ).hidden_s
        for reshard_after in ("backward", "forward")
    )
    return gathered - kept


@pytest.mark.parametrize(
    ("num_shards", "tensor", "bytes_per_s"),
    [
        (8, 1, 450e9),  # within a host
        (2, 4, 450e9),
        (16, 1, 400e9),  # eight ranks of the group on each host, each with its card
        (16, 4, 100e9),
        (16, 8, 50e9),
        (2, 16, 50e9),  # a tensor-parallel group fills two hosts
    ],
)
def test_a_gather_over_hosts_gets_the_cards_of_the_ranks_that_a_host_has_of_its_group(
    num_shards: int, tensor: int, bytes_per_s: float
) -> None:
    seconds = gather_s(make_trainer(num_ranks=num_shards * tensor, tensor_parallel=tensor))
    moved = sum_of_parameters() / tensor * 2 * (num_shards - 1) / num_shards
    assert moved / seconds == pytest.approx(EFFICIENCY * bytes_per_s, rel=1e-6)


def test_attention_takes_more_than_half_as_long_as_the_rest_of_a_prefill_of_32k_tokens() -> None:
    costs = hardware_costs(make_gpu_recipe(), LLAMA_8B)
    length = 32768
    pairs_flops = 32 * 32 * 128 * 4 * length**2 / 2
    attention_s = pairs_flops / (EFFICIENCY * 989e12)
    whole_s = costs.prefill_s([length]) - costs.prefill_call_s
    assert whole_s - length * costs.prefill_token_s == pytest.approx(attention_s, rel=1e-9)
    assert attention_s == pytest.approx(0.57 * length * costs.prefill_token_s, rel=0.02)


def test_two_short_prefills_take_less_than_one_of_their_tokens_together() -> None:
    costs = Costs(prefill_call_s=1.0, prefill_token_s=0.1, prefill_square_s=0.01)
    assert costs.prefill_s([10, 10]) == pytest.approx(1 + 2 + 2)
    assert costs.prefill_s([20]) == pytest.approx(1 + 2 + 4)
    assert costs.prefill_s([0, 0]) == costs.prefill_s([]) == 0


def test_a_replica_prefills_each_rollout_by_the_square_of_its_own_length() -> None:
    prompt, num_groups = 41, 8
    config = make_recipe(
        sampling=SamplingConfig(rollouts_per_prompt=2, max_tokens=8),
        generator=EmbeddedConfig(max_num_seqs=64, max_model_len=64),
        trainer=TrainerConfig(groups_per_step=num_groups, tokens_per_micro_batch=128),
        staleness=StalenessConfig(max_staleness=0),
        plan=PlanConfig(prompt_tokens=prompt, median_tokens=4, spread=0.0, num_steps=6),
    )
    costs = Costs(decode_step_s=0.01, token_s=1e-5)
    square_s = 1e-5
    plain, squared = (
        simulate(config, LLAMA, replace(costs, prefill_square_s=each)).step_s
        for each in (0.0, square_s)
    )
    # The last prompt token is the first decode step's; a prompt is prefilled once for its group.
    # Log-prob checks, which are prefilled too, end beside it.
    assert squared - plain == pytest.approx(num_groups * (prompt - 1) ** 2 * square_s, rel=0.01)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_reference_takes_its_time_from_the_trainers_gpus(num_ranks: int) -> None:
    prompt, response, num_groups, rollouts = 10, 20, 8, 4
    config = make_recipe(
        sampling=SamplingConfig(rollouts_per_prompt=rollouts, max_tokens=64),
        algorithm=AIPOConfig(kl_coefficient=0.1),
        generator=EmbeddedConfig(max_num_seqs=64, max_model_len=128),
        trainer=TrainerConfig(
            num_ranks=num_ranks, groups_per_step=num_groups, tokens_per_micro_batch=4096
        ),
        plan=PlanConfig(prompt_tokens=prompt, median_tokens=response, spread=0.0, num_steps=8),
    )
    costs = Costs(decode_step_s=1e-3, token_s=1e-3, infer_token_s=3e-4, infer_square_s=1e-6)
    alone = simulate(replace(config, algorithm=AIPOConfig()), LLAMA, costs).step_s
    both = simulate(config, LLAMA, costs).step_s
    length = prompt + response
    infer_s = num_groups * rollouts * (length * 3e-4 + length**2 * 1e-6)
    assert both - alone == pytest.approx(infer_s, rel=1e-3)
