"""Costs from hardware, against figures worked out by hand from published peaks, and forecasts
against public measurements."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import replace

import pytest

from llamarl.core.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.core.device.hardware import GPUS
from llamarl.planner.efficiency import COLLECTIVE_S, CONFIRMED, LAW, OVERLAP, SPREADS
from llamarl.planner.law import hardware_costs, latency_s, trainer_times
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.trainer.losses.aipo import AIPOConfig
from tests.places import ROOT
from tests.planner.planner_recipes import LLAMA, make_recipe

sys.path.insert(0, str(ROOT / "tools"))
from harness import read
from planner_bench import external

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


def test_a_collective_starts_later_the_more_hosts_it_spans() -> None:
    config = make_gpu_recipe()
    starts = [latency_s(config, ranks, 12e-6) for ranks in (1, 8, 16, 32, 128)]
    assert starts == pytest.approx([0.0, 12e-6, 40e-6, 50e-6, 70e-6])


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
def test_a_gather_gets_the_cards_of_hosts(num_shards: int, tensor: int, bytes_per_s: float) -> None:
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


ROWS = external.read_measurements()
PAGE = ROOT / "docs" / "benchmarks" / "planner_external.json"
QUICK = ("8 H100", "8 B200", "1 A6000", "128/2048", "one sequence")


def page_ratios() -> dict[str, float]:
    """By row, as the page has them."""
    found = {case: values["ratio"] for case, values in read(PAGE).items() if "ratio" in values}
    return {case.removesuffix(" (fit)").removesuffix(" (partial)"): r for case, r in found.items()}


def test_the_page_has_every_row_and_the_bands_are_its_quantiles() -> None:
    ratios = page_ratios()
    assert ratios.keys() == {each.name for each in ROWS}
    rows = external.counted(ROWS)
    for kind, spread in SPREADS.items():
        assert external.spread_of(external.on_confirmed(rows[kind], ratios)) == spread, kind
    for kind, cards in CONFIRMED.items():
        assert external.confirmed(rows[kind], ratios) == [*cards], kind


def test_the_pages_say_what_the_table_says() -> None:
    ratios, planning = page_ratios(), (ROOT / "docs" / "planning.md").read_text()
    for spread in SPREADS.values():
        half, most = (f"{low:g} to {high:g}" for low, high in (spread.half, spread.most))
        cells = f"| {spread.num_rows} | {half if spread.half != spread.most else ''} | {most} |"
        assert cells.replace("|  |", "| |") in planning
    fitted = max(external.error(ratios[each.name]) for each in ROWS if each.is_fit)
    assert f"of the fitted rows, max(ratio, 1 / ratio) - 1, is {fitted:.2f}." in planning
    rows = external.counted(ROWS)["generator"]
    there = external.spread_of([ratios[each.name] for each in rows if each.gpu == "H20-96GB"])
    low, high = there.half
    assert f"H20-96GB, which take {low:g} to {high:g} times" in planning
    assert f"in the middle half of {there.num_rows} rows" in planning


def test_the_first_run_on_a_gpu_expects_what_its_recipe_forecasts() -> None:
    recipe = (ROOT / "recipes" / "gsm8k_llama32_1b_1gpu" / "README.md").read_text()
    (step_s,) = re.findall(r"as planned: .*?  +([\d.]+) ", recipe)
    (band,) = re.findall(r"a step as planned takes ([\d.]+ to [\d.]+) s", recipe)
    first = (ROOT / "docs" / "first-gpu-run.md").read_text()
    assert f"forecasts {step_s} seconds a step" in first
    assert f"200 steps take {200 * float(step_s) / 60:.0f} minutes" in first
    assert f"it may be {band} seconds" in first


@pytest.mark.long
def test_forecasts_of_public_measurements_are_those_of_the_page() -> None:
    rows = [each for each in ROWS if any(quick in each.name for quick in QUICK)]
    compare_with_page([each for each in rows if each.only != "recipe"])


@pytest.mark.slow
def test_every_forecast_of_a_public_measurement_is_that_of_the_page() -> None:
    compare_with_page(ROWS)


def compare_with_page(rows: list[external.Measurement]) -> None:
    known = page_ratios()
    for name, ratio in external.compare(rows).items():
        assert ratio == pytest.approx(known[name], rel=0.01), name
    fitted = (external.error(known[each.name]) for each in ROWS if each.is_fit)
    assert max(fitted) <= external.GOAL_FIT


def test_three_rows_are_fitted_each_has_a_source_and_no_name_occurs_twice() -> None:
    assert sum(each.is_fit for each in ROWS) == 3
    assert len({each.name for each in ROWS}) == len(ROWS)
    assert all(len(each.source) > 20 and each.measured > 0 for each in ROWS)
    assert not any(each.is_fit and each.is_partial for each in ROWS)


def test_every_efficiency_is_a_share() -> None:
    shares = dataclasses.asdict(LAW)
    for name, card in GPUS.items():
        shares[f"{name} gemm"] = card.gemm
        shares |= {f"{name} {kernel}": share for kernel, share in card.attention.items()}
    assert all(0 < share <= 1 for share in shares.values()), shares
