"""Plans of replicas that differ: memory, publish and steps by pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamarl.controller.memory import forecast_memory
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
from llamarl.planner.forecast import StepForecast
from llamarl.planner.law import hardware_costs
from llamarl.planner.publish import forecast_publish
from llamarl.planner.recipe import forecast_recipe
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import run, simulate
from llamarl.planner.simulation.workload import make_workload
from tests.planner.planner_recipes import LLAMA, make_recipe

MODEL = replace(
    LLAMA,
    vocab_size=4096,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=24,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=65536,
)
"""Of a step of 16 groups: which replica gets which of them (up to 0.05 in four such recipes)."""


def recipe(*pools: str, num_replicas: int = 4, gpu: str = "H800-80GB", **plan: Any) -> Config:
    """Rollouts of a group have lengths of their own: else a step scatters more."""
    plan = {"group_correlation": 0.0} | plan
    return make_recipe(
        trainer=TrainerConfig(
            device="cuda",
            compute_dtype="bfloat16",
            num_ranks=4,
            groups_per_step=16,
            tokens_per_micro_batch=4096,
        ),
        generator=EmbeddedConfig(
            device="cuda",
            dtype="bfloat16",
            num_replicas=1 if pools else num_replicas,
            max_num_seqs=16,
            max_model_len=4096,
            pools=[*pools],
        ),
        sampling=SamplingConfig(rollouts_per_prompt=8, max_tokens=2048),
        weights=WeightsConfig(transport="collective"),
        cluster=ClusterConfig(num_hosts=8, num_gpus_per_host=4, gpu=gpu),
        plan=PlanConfig(prompt_tokens=20, median_tokens=500, spread=0.3, num_steps=8, **plan),
    )


def step_of(config: Config) -> StepForecast:
    return simulate(config, MODEL, hardware_costs(config, MODEL))


def test_one_pool_forecasts_as_none() -> None:
    plain, pooled = recipe(), recipe("num_replicas=4")
    assert hardware_costs(pooled, MODEL) == hardware_costs(plain, MODEL)
    with_pool, without = (forecast_publish(each, MODEL) for each in (pooled, plain))
    key, stages = "generator.pools[0]", without.stages_s
    assert sum(stages.values()) == without.seconds
    assert with_pool == replace(without, pool_stages_s={key: stages})
    found = step_of(pooled)
    assert replace(found, pools={}) == step_of(plain)


def test_a_replica_decodes_and_gets_its_weights_as_its_own_pool_does() -> None:
    config = recipe("num_replicas=1", "dtype=float32")  # of another kind: the trainer feeds both
    fast = Costs(decode_step_s=0.01, write_s=0.1, check_s=0.1)
    slow = replace(fast, decode_step_s=0.03, write_s=5.0)
    costs = replace(fast, pools=(fast, slow))
    timeline = clock.run(run(config, costs, MODEL, make_workload(config), 8))
    rates = [pool.tokens_per_s for pool in simulate(config, MODEL, costs).pools.values()]
    assert 2.0 < rates[0] / rates[1] < 5.0, "three times as fast"
    for replica, own in enumerate((fast, slow)):
        bars = timeline.bars[f"publish-{replica}"]
        assert bars
        for start_s, end_s, *_ in bars:
            assert end_s - start_s == pytest.approx(own.write_s)
    equal = simulate(config, MODEL, replace(fast, pools=(fast, fast)))
    rates = [pool.tokens_per_s for pool in equal.pools.values()]
    assert 0.6 < rates[0] / rates[1] < 1.7


def test_a_publish_counts_each_pools_bytes_and_ends_with_the_slowest() -> None:
    pools = ["num_replicas=4", "num_replicas=4 dtype=float32 gpu=H20-96GB"]
    both = forecast_publish(recipe(*pools), MODEL)
    narrow = forecast_publish(recipe(pools[0]), MODEL)
    wide = forecast_publish(recipe(pools[0].replace("=4", "=4 dtype=float32")), MODEL)
    assert both.total_bytes == narrow.total_bytes + wide.total_bytes
    assert wide.total_bytes == 2 * narrow.total_bytes
    assert both.seconds == max(both.pool_s.values())
    assert both.pool_s["generator.pools[1]"] > both.pool_s["generator.pools[0]"]
    assert both.seconds >= both.lower_bound_s


def test_the_trainer_must_fit_its_own_kind_of_gpu_whatever_the_pools_have() -> None:
    ranks = forecast_memory(recipe("gpu=H20-96GB"), MODEL).ranks
    sizes = {rank.executor: rank.device_bytes for rank in ranks}
    assert sizes == {
        "trainer": GPUS["H800-80GB"].memory_bytes,
        "generator.pools[0]": GPUS["H20-96GB"].memory_bytes,
    }


@pytest.mark.parametrize(("run_dir", "sweep"), [("runs/x", False), (None, True)])
def test_what_takes_replicas_to_be_alike_refuses_pools(run_dir: str | None, sweep: bool) -> None:
    with pytest.raises(ValueError, match=r"^generator\.pools must be \[\] with --(trace|sweep)"):
        forecast_recipe(recipe("num_replicas=1"), MODEL, run_dir=run_dir, sweep=sweep)
