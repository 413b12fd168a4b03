"""Costs of a recipe on its hardware, put together.

Owns: costs of publishes and of changes of place, and which of the others go into `Costs`. Does not
own: those of passes (`trainer_times.py`) and decode steps (`generator_times.py`), bytes of a
publish (`publish.py`) or memory (`memory/`). Invariant: every second follows from bytes or
arithmetic, a peak of `hardware.py` and a constant of `efficiency.py`."""

import math
from dataclasses import replace
from typing import Any

from llamarl.core.config import Config
from llamarl.core.config.generator import alone, pools_of
from llamarl.model.adapter_inventory import trained_shapes
from llamarl.model.architecture import Architecture
from llamarl.planner import hardware
from llamarl.planner.efficiency import LAW, REWARD_S
from llamarl.planner.forecast import PublishForecast
from llamarl.planner.memory.trainer_memory import MASTER_BYTES
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_bytes, generator_times
from llamarl.planner.simulation.publish import forecast_publish, relays
from llamarl.planner.simulation.trainer_times import sizes, trainer_times
from llamarl.publish.reshard import DTYPE_BYTES


def hardware_costs(
    config: Config, architecture: Architecture, publish: PublishForecast | None = None
) -> Costs:
    """What `config` takes on its GPUs. `publish` is its forecast, made here if it is not given;
    replicas with more ranks than key-value heads, which only comparisons have, are taken to get
    their weights over their cards."""
    heads = architecture.num_kv_heads
    pools, siblings = pools_of(config.generator), relays(config)[1]
    if publish is None and all(heads % pool.generator.num_ranks == 0 for pool in pools):
        publish = forecast_publish(config, architecture)
    parts = []
    for pool in pools:
        own = alone(config, pool)
        passed: dict[str, Any] = {"write_s": _over_cards_s(own, architecture)}
        if publish is not None:
            is_relayed = any(replica in pool.replicas for _, replica in siblings)
            passed = _publish(publish.pool_stages_s[pool.key], 1 + is_relayed)
        parts.append(Costs(**generator_times(own, architecture), **passed))
    return replace(
        parts[0],
        **trainer_costs(config, architecture),
        moves_s=_moves(config, architecture),
        score_row_s=REWARD_S,
        pools=tuple(parts) if len(parts) > 1 else (),
    )


def trainer_costs(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Fields of `Costs` for the trainer and the reference on its GPUs."""
    times, trainer = trainer_times(config, architecture), config.trainer
    num_gathers = {"forward": 2, "backward": 1, "step": 0}[trainer.reshard_after]
    hidden_s = num_gathers * times.gather_s + times.reduce_s
    forward_s = times.token_s * times.forward_token_share
    forward_square_s = times.attention_s * times.forward_square_share
    # With adapters the policy is its own reference: one more forward pass in each micro-batch.
    is_own = config.algorithm.has_reference and not config.has_reference_model
    return {
        "token_s": times.token_s + is_own * forward_s,
        "square_s": times.attention_s + is_own * forward_square_s,
        "hidden_s": hidden_s,
        # The first layer's traffic has nothing to go on beside.
        "micro_batch_s": hidden_s / architecture.num_layers + times.latency_s,
        "launch_s": times.launch_s,
        "forward_share": times.forward_token_share,
        "optimizer_s": times.optimizer_s
        + (times.gather_s if trainer.reshard_after == "step" else 0.0),
        "snapshot_s": times.snapshot_s,
        "infer_token_s": forward_s / trainer.num_data_ranks,
        "infer_square_s": forward_square_s / trainer.num_data_ranks,
    }


def _publish(stages_s: dict[str, float], num_rounds: int) -> dict[str, float]:
    """A version's way to the first replica of a host, in two rounds on to the others, its check and
    its way into use in each; together they take as long as its stages."""
    phases_s = stages_s["phases"] / num_rounds
    moved_s = sum(stages_s[name] for name in ("maxima", "packing", "wire", "unpacking"))
    return {
        "write_s": moved_s + phases_s,
        "relay_s": stages_s["relay"] + phases_s if num_rounds > 1 else 0.0,
        "check_s": stages_s["verify"] / num_rounds,
        "commit_s": stages_s["commit"] / num_rounds,
    }


def _over_cards_s(config: Config, architecture: Architecture) -> float:
    """A version's way to a replica, by its bytes alone."""
    gpu = hardware.gpu(config.cluster.planned_gpu, config.generator.device)
    rank_bytes = _published_bytes(config, architecture) / config.generator.num_ranks
    return rank_bytes / (gpu.card_bytes_per_s * LAW.card)


def _published_bytes(config: Config, architecture: Architecture) -> float:
    """Versions travel in the generator's dtype and are quantised there."""
    shapes = trained_shapes(architecture, config.trainer.lora).values()
    return sum(map(math.prod, shapes)) * DTYPE_BYTES[config.generator.dtype]


def _moves(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Changes of place on a shared device, over the link to the host."""
    if not config.placement.colocated or config.placement.offload == "none":
        return {}
    trainer, generator = config.trainer, config.generator
    gpu = hardware.gpu(config.cluster.planned_gpu, trainer.device)
    rate = gpu.host_link_bytes_per_s * LAW.link
    local = sizes(architecture).total / (trainer.num_shard_ranks * trainer.tensor_parallel)
    # Beside adapters weights are in the compute dtype, and have no moments.
    lora, weight_item, share = trainer.lora, float(MASTER_BYTES), 1.0
    if lora.is_used:
        shapes = trained_shapes(architecture, lora).values()
        weight_item = DTYPE_BYTES[trainer.compute_dtype]
        share = sum(map(math.prod, shapes)) / sizes(architecture).total
    weights_bytes = generator_bytes(config, architecture)
    if generator.quantization != "none":
        weights_bytes += _published_bytes(config, architecture) / generator.num_ranks
    return {
        "trainer weights": weight_item * local / rate,
        # Both moments; gradients are freed.
        "trainer state": 2 * MASTER_BYTES * local * share / rate,
        "generator weights": weights_bytes / rate,
        "generator kv": 0.0,  # nothing runs then, so nothing is kept
    }
