"""Costs from hardware, against figures worked out by hand from published peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamarl.core.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    VllmConfig,
    WeightsConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.core.device.hardware import GPUS
from llamarl.planner.efficiency import COLLECTIVE_S, LAW, OVERLAP
from llamarl.planner.law import bytes_per_s as rate_of
from llamarl.planner.law import hardware_costs, latency_s, trainer_times
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.trainer.losses.aipo import AIPOConfig
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


@pytest.mark.parametrize(
    ("num_ranks", "stride", "bytes_per_s"),
    [
        (8, 1, 450e9),  # within a host: its links
        (2, 4, 450e9),
        (16, 1, 400e9),  # eight ranks of the group on each host, each with its card
        (16, 4, 100e9),
        (16, 8, 50e9),
    ],
)
def test_a_collective_gets_the_links_of_its_host_or_the_cards_that_its_ranks_have_on_one(
    num_ranks: int, stride: int, bytes_per_s: float
) -> None:
    found = rate_of(make_gpu_recipe(), H100, num_ranks, stride)
    assert found == pytest.approx(LAW.link * bytes_per_s)


def test_a_collective_starts_later_the_more_hosts_it_spans() -> None:
    config = make_gpu_recipe()
    starts = [latency_s(config, ranks, 12e-6) for ranks in (1, 8, 16, 32, 128)]
    assert starts == pytest.approx([0.0, 12e-6, 40e-6, 50e-6, 70e-6])


def test_a_tensor_parallel_decode_step_pays_for_its_sums() -> None:
    rows, hidden = 64, 4096 * 2
    alone, wide = (
        hardware_costs(make_gpu_recipe(num_generator_ranks=ranks), LLAMA_8B) for ranks in (1, 8)
    )
    sums_s = 64 * 2 * 7 / 8 * hidden / (LAW.link * 450e9)
    # All else of a row gets shorter with more ranks, but for what each rank does of the whole.
    assert wide.decode_row_s > sums_s
    assert wide.decode_row_s < alone.decode_row_s + sums_s
    assert wide.decode_s(rows, rows * 1000) < alone.decode_s(rows, rows * 1000)


def sum_of_parameters() -> int:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    return 32 * layer + 2 * 128256 * 4096 + 4096


def gather_s(trainer: TrainerConfig) -> float:
    """Seconds of one gather of all weights, without its starts."""
    config = make_gpu_recipe(trainer=trainer)
    starts_s = LLAMA_8B.num_layers * latency_s(
        config, trainer.num_shard_ranks, COLLECTIVE_S, trainer.tensor_parallel
    )
    return trainer_times(config, LLAMA_8B).gather_s - starts_s


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
    assert moved / seconds == pytest.approx(LAW.link * bytes_per_s, rel=1e-6)


def test_attention_takes_longer_than_the_rest_of_a_prefill_of_32k_tokens() -> None:
    costs = hardware_costs(make_gpu_recipe(), LLAMA_8B)
    length = 32768
    pairs_flops = 32 * 32 * 128 * 4 * length**2 / 2
    attention_s = pairs_flops / (0.332 * 989e12)
    whole_s = costs.prefill_s([length]) - costs.prefill_call_s
    assert whole_s - length * costs.prefill_token_s == pytest.approx(attention_s, rel=1e-9)
    assert attention_s == pytest.approx(1.05 * length * costs.prefill_token_s, rel=0.1)


def test_a_step_of_products_alone_takes_its_arithmetic_at_the_cards_rate() -> None:
    """8B, 16,384 tokens a rank, nothing repeated: 6 flops per parameter and token."""
    times = trainer_times(make_gpu_recipe(trainer=make_trainer(num_ranks=8)), LLAMA_8B)
    matrices = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    lowest = 6 * 32 * matrices / (989e12 * H100.gemm * LAW.gemm)
    assert lowest < times.gemm_s < 1.2 * lowest, "small matrices cost a little more"


def test_the_head_takes_time_for_response_tokens_alone() -> None:
    config = make_gpu_recipe(trainer=make_trainer(num_ranks=8))
    most = config.sampling.max_tokens
    one, half = (
        trainer_times(
            replace(config, plan=PlanConfig(prompt_tokens=n, median_tokens=most, spread=0)),
            LLAMA_8B,
        )
        for n in (1, most)
    )
    assert half.loss_s == pytest.approx(one.loss_s * (most + 1) / most / 2)
    assert half.gemm_s == one.gemm_s


def test_attention_backwards_is_two_and_a_half_forward_passes_at_a_lower_rate() -> None:
    plain, full = (
        trainer_times(
            make_gpu_recipe(trainer=replace(make_trainer(num_ranks=8), activation_checkpointing=c)),
            LLAMA_8B,
        ).attention_s
        for c in ("none", "full")
    )
    forward_s = full - plain
    assert forward_s == pytest.approx(2 * 32 * 32 * 128 / (0.332 * 989e12))
    assert plain / forward_s == pytest.approx(1 + 2.5 / LAW.backward_attention)


def test_fused_kernels_move_fewer_bytes_and_eager_decode_steps_wait_for_launches() -> None:
    config = make_gpu_recipe(trainer=make_trainer(num_ranks=8))
    eager, fused = (
        trainer_times(replace(config, plan=PlanConfig(kernels=kernels)), LLAMA_8B).elementwise_s
        for kernels in ("eager", "fused")
    )
    assert fused < eager / 2 * 1.2
    graphs, without = (
        hardware_costs(
            replace(config, generator=replace(config.generator, enforce_eager=not is_graph)),
            LLAMA_8B,
        )
        for is_graph in (True, False)
    )
    assert without.decode_launch_s == pytest.approx(32 * 40 * 5e-6)
    assert graphs.decode_launch_s == 0


def test_eight_bit_keys_halve_what_a_context_takes() -> None:
    def costs_of(dtype: str) -> Costs:
        generator = VllmConfig(
            device="cuda", dtype="bfloat16", max_model_len=4096, kv_cache_dtype=dtype
        )
        return hardware_costs(replace(make_gpu_recipe(), generator=generator), LLAMA_8B)

    wide, narrow = costs_of("auto"), costs_of("fp8")
    assert 0.5 <= narrow.decode_context_s / wide.decode_context_s < 0.6
    assert narrow.kv_tokens == 2 * wide.kv_tokens


def test_a_decode_step_reads_weights_and_computes_longer_than_either_takes() -> None:
    costs = Costs(decode_step_s=1.0, decode_read_s=3.0, decode_flops_s=2.0, decode_context_s=0.5)
    assert costs.decode_s(2, 10) == pytest.approx(1 + 5 + 5)
    assert costs.decode_s(2, 10, 3) == pytest.approx(3 * (1 + 5) + 0.5 * (10 + 12 + 14))
    launched = replace(costs, decode_launch_s=20.0)
    assert launched.decode_s(2, 10, 3) == 60


def test_a_micro_batch_is_as_long_as_its_work_traffic_or_launches_and_traffic_slows_work() -> None:
    costs = Costs(hidden_s=2.0, launch_s=5.0, micro_batch_s=1.0)
    assert costs.passes_s(1.0) == pytest.approx(1 + 5 + OVERLAP)
    assert costs.passes_s(10.0) == pytest.approx(1 + 10 + 2 * OVERLAP)


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
