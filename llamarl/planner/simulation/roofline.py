"""Costs of a recipe on its hardware, put together.

Owns: costs of publishes and of changes of place, and which of the others go into `Costs`. Does not
own: those of passes (`trainer_times.py`) and decode steps (`generator_times.py`), bytes of a
publish (`publish.py`) or memory (`memory/`). Invariant: every second follows from bytes or
arithmetic, a peak of `hardware.py` and a constant of `efficiency.py`."""

from dataclasses import replace
from typing import Any

from llamarl.config import Config
from llamarl.config.pools import alone, pools_of
from llamarl.models.architecture import Architecture
from llamarl.planner import hardware
from llamarl.planner.efficiency import REWARD_S
from llamarl.planner.forecast import PublishForecast
from llamarl.planner.hardware import EFFICIENCY
from llamarl.planner.memory.trainer_memory import MASTER_BYTES
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_bytes, generator_times
from llamarl.planner.simulation.publish import forecast_publish, relays
from llamarl.planner.simulation.trainer_times import sizes, trainer_times
from llamarl.weights.layout.reshard import DTYPE_BYTES


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
        publish_s = publish.pool_s[pool.key] if publish is not None else None
        is_relayed = any(replica in pool.replicas for _, replica in siblings)
        passed = _publish(own, architecture, publish_s, is_relayed)
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
    return {
        "token_s": times.token_s,
        "square_s": times.attention_s,
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


def _publish(
    config: Config, architecture: Architecture, publish_s: float | None, is_relayed: bool
) -> dict[str, Any]:
    """A version's way to the first replica of a host, on to the others (`is_relayed`), and into
    use; together they take `publish_s`."""
    generator = config.generator
    gpu = hardware.gpu(config.cluster.planned_gpu, generator.device)
    rank_bytes = _published_bytes(config, architecture) / generator.num_ranks
    relay_s = rank_bytes / (gpu.link_bytes_per_s * EFFICIENCY)
    commit_s = 0.0
    if config.weights.staging == "host":
        commit_s = rank_bytes / (gpu.host_link_bytes_per_s * EFFICIENCY)
    total_s = rank_bytes / (gpu.card_bytes_per_s * EFFICIENCY)
    if publish_s is not None:
        total_s = publish_s - commit_s - is_relayed * relay_s
    return {"write_s": max(0.0, total_s), "relay_s": relay_s, "commit_s": commit_s}


def _published_bytes(config: Config, architecture: Architecture) -> float:
    """Versions travel in the generator's dtype and are quantised there."""
    return sizes(architecture).total * DTYPE_BYTES[config.generator.dtype]


def _moves(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Changes of place on a shared device, over the link to the host."""
    if not config.placement.colocated or config.placement.offload == "none":
        return {}
    trainer, generator = config.trainer, config.generator
    gpu = hardware.gpu(config.cluster.planned_gpu, trainer.device)
    rate = gpu.host_link_bytes_per_s * EFFICIENCY
    local = sizes(architecture).total / (trainer.num_shard_ranks * trainer.tensor_parallel)
    weights_bytes = generator_bytes(config, architecture)
    if generator.quantization != "none":
        weights_bytes += _published_bytes(config, architecture) / generator.num_ranks
    return {
        "trainer weights": MASTER_BYTES * local / rate,
        "trainer state": 2 * MASTER_BYTES * local / rate,  # both moments; gradients are freed
        "generator weights": weights_bytes / rate,
        "generator kv": 0.0,  # nothing runs then, so nothing is kept
    }
