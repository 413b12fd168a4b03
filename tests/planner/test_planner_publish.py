"""Publishes as forecast, against plans of the whole model and arithmetic done again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import (
    ClusterConfig,
    Config,
    EmbeddedConfig,
    PlacementConfig,
    TrainerConfig,
    VllmConfig,
    WeightsConfig,
)
from llamarl.core.config.generator import pools_of
from llamarl.core.device.hardware import GPUS
from llamarl.generator.memory import generator_layouts, weight_buffer
from llamarl.planner.publish import forecast_publish, relays, traffic
from llamarl.publish.reshard import num_bytes, plan
from llamarl.trainer.memory import trainer_layouts
from tests.planner.planner_recipes import LLAMA, make_recipe


def recipe(
    *, shard: int, tensor: int, target: int, replicas: int, replicate: int = 1, **more: object
) -> Config:
    made = {
        "trainer": TrainerConfig(
            num_ranks=replicate * shard * tensor,
            tensor_parallel=tensor,
            replicate=replicate,
            device="cuda",
        ),
        "generator": EmbeddedConfig(
            num_ranks=target, num_replicas=replicas, dtype="bfloat16", device="cuda"
        ),
        "weights": WeightsConfig(transport="collective"),
        "cluster": ClusterConfig(num_hosts=16, num_gpus_per_host=4),
    }
    return make_recipe(**made | more)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["embedded", "vllm"]),
)
def test_layers_add_up_to_the_whole_plan(shard: int, tensor: int, target: int, engine: str) -> None:
    config = recipe(shard=shard, tensor=tensor, target=target, replicas=1)
    if engine == "vllm":
        config = replace(config, generator=VllmConfig(num_ranks=target, dtype="bfloat16"))
    matrix = np.zeros((shard * tensor, target), np.int64)
    for copy in plan(trainer_layouts(config, LLAMA), generator_layouts(config, LLAMA)):
        matrix[copy.source_rank, copy.target_rank] += num_bytes([copy])
    made = traffic(config, LLAMA, pools_of(config.generator)[0])
    assert (made.num_bytes.sum(0) == matrix.sum(0)).all()
    # Which of several holders sends a norm is not compared here.
    norms = 2 * 32 * (2 * LLAMA.num_layers + 1) * (tensor > 1)
    assert abs(made.num_bytes - matrix).max() <= norms
    for rank in range(target):
        held = sum(
            np.prod(np.subtract(box.stop, box.start))
            for layout in weight_buffer(config, LLAMA, rank).parameters.values()
            for box in layout.boxes
        )
        assert made.num_bytes[:, rank].sum() == 2 * held


@pytest.mark.parametrize(
    ("replicas", "heads", "siblings"), [(1, [0], []), (2, [0, 1], []), (4, [0, 1, 3], [(1, 2)])]
)
def test_the_trainer_feeds_one_replica_of_a_host_and_that_one_the_others(
    replicas: int, heads: list[int], siblings: list[tuple[int, int]]
) -> None:
    # Four GPUs a host: the trainer has host 0 and half of host 1.
    config = recipe(shard=6, tensor=1, target=2, replicas=replicas)
    assert relays(config) == (heads, siblings)


def test_on_one_gpu_a_publish_is_a_copy_in_its_memory() -> None:
    placement = PlacementConfig(colocated=True)
    weights = WeightsConfig(transport="cuda_ipc")
    config = recipe(
        shard=1,
        tensor=1,
        target=1,
        replicas=1,
        placement=placement,
        weights=weights,
        cluster=ClusterConfig(),
    )
    made = forecast_publish(config, LLAMA)
    rate = GPUS["H100-80GB"].memory_bytes_per_s
    assert made.lower_bound_s == pytest.approx(2 * made.total_bytes / rate)
    assert made.max_card_bytes_out == made.max_card_bytes_in == 0


def stages_of(num_replicas: int, **weights: object) -> dict[str, float]:
    """Of a publish to replicas that have a host each."""
    weights_config = WeightsConfig(**{"transport": "collective"} | weights)
    config = recipe(shard=4, tensor=1, target=4, replicas=num_replicas, weights=weights_config)
    return forecast_publish(config, replace(LLAMA, hidden_size=512, head_dim=64)).stages_s


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 14))
def test_more_replicas_never_take_less_time(num_replicas: int) -> None:
    some, more = stages_of(num_replicas), stages_of(num_replicas + 1)
    assert sum(more.values()) >= sum(some.values())
    assert more["verify"] == some["verify"]


def test_staging_in_host_memory_is_reached_over_its_link() -> None:
    here, there = stages_of(2), stages_of(2, staging="host")
    assert there["commit"] > here["commit"]
    assert sum(there.values()) > sum(here.values())


def test_a_relay_takes_a_second_round_of_calls() -> None:
    alone = stages_of(1)
    relayed = recipe(shard=4, tensor=1, target=1, replicas=4)
    found = forecast_publish(relayed, LLAMA).stages_s
    assert found["relay"] > 0
    assert found["phases"] == 2 * alone["phases"]
