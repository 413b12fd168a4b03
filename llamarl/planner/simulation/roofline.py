"""Costs from hardware: bytes over bandwidths and arithmetic over peaks.

Owns: which bytes and which arithmetic each piece of work takes. Does not own: constants of hardware
(`hardware.py`), bytes of a publish (`publish.py`) or memory (`memory/`). Invariant: everything
runs at EFFICIENCY of its published peak, and every collective by one law of the network
(`_collective_rate`); traffic that FSDP2 prefetches hides behind arithmetic, that of tensor
parallelism does not.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from llamarl.config import Config
from llamarl.config.pools import alone, pools_of
from llamarl.models.architecture import Architecture
from llamarl.models.inventory import parameter_shapes
from llamarl.planner import hardware
from llamarl.planner.forecast import PublishForecast
from llamarl.planner.hardware import EFFICIENCY
from llamarl.planner.memory.trainer_memory import MASTER_BYTES
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.publish import forecast_publish, relays
from llamarl.weights.layout.reshard import DTYPE_BYTES

QUANTIZED_BYTES = 1

# Allowances, no published figures. Kernels of one decoder layer in a captured graph, and what each
# costs beyond its work; NCCL's smallest all-reduce within a host and between hosts; what the
# engine's own process does between two steps; one reward of a mathematical answer on one core.
NUM_LAYER_KERNELS = 12
KERNEL_S = 2e-6
ALL_REDUCE_S = 12e-6
ALL_REDUCE_BETWEEN_HOSTS_S = 40e-6
ENGINE_STEP_S = 1e-3
REWARD_S = 5e-3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters: all of them, those of the layers' matrices, those of the head's."""

    total: int
    layers: int
    head: int


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
        parts.append(Costs(**_generator(own, architecture), **passed))
    return replace(
        parts[0],
        **_trainer(config, architecture),
        moves_s=_moves(config, architecture),
        score_row_s=REWARD_S,
        pools=tuple(parts) if len(parts) > 1 else (),
    )


def sizes(architecture: Architecture) -> Sizes:
    """Numbers of parameters."""
    shapes = parameter_shapes(architecture)
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    layers = sum(n for name, n in counts.items() if ".layers." in name)
    head = architecture.vocab_size * architecture.hidden_size
    return Sizes(total=sum(counts.values()), layers=layers, head=head)


def generator_bytes(config: Config, architecture: Architecture) -> float:
    """Weights that one generator rank reads in every decode step."""
    count, generator = sizes(architecture), config.generator
    dtype_bytes = DTYPE_BYTES[generator.dtype]
    layer_bytes = dtype_bytes if generator.quantization == "none" else QUANTIZED_BYTES
    return (count.layers * layer_bytes + count.head * dtype_bytes) / generator.num_ranks


def kv_bytes(config: Config, architecture: Architecture) -> float:
    """Keys and values of one token on one generator rank."""
    a, generator = architecture, config.generator
    num_heads = max(1.0, a.num_kv_heads / generator.num_ranks)
    return 2 * a.num_layers * num_heads * a.head_dim * DTYPE_BYTES[generator.dtype]


def _generator(config: Config, architecture: Architecture) -> dict[str, Any]:
    a, generator, count = architecture, config.generator, sizes(architecture)
    num_ranks, gpu = generator.num_ranks, hardware.gpu(config.cluster.planned_gpu, generator.device)
    is_fp8 = generator.quantization.startswith("fp8") and "fp8" in gpu.flops
    peak = gpu.flops["fp8" if is_fp8 else generator.dtype] * EFFICIENCY
    memory = gpu.memory_bytes_per_s * EFFICIENCY
    flops_s = 2 * (count.layers + count.head) / num_ranks / peak
    num_sums = 2 * a.num_layers if num_ranks > 1 else 0
    row_bytes = a.hidden_size * DTYPE_BYTES[generator.dtype]
    rate = _collective_rate(config, gpu, num_ranks)
    sums_s = num_sums * 2 * (num_ranks - 1) / num_ranks * row_bytes / rate
    is_wide = num_ranks > config.cluster.num_gpus_per_host
    latency_s = ALL_REDUCE_BETWEEN_HOSTS_S if is_wide else ALL_REDUCE_S
    step_s = num_sums * latency_s + a.num_layers * NUM_LAYER_KERNELS * KERNEL_S + ENGINE_STEP_S
    return {
        "decode_step_s": step_s,
        "decode_row_s": sums_s,
        "decode_read_s": generator_bytes(config, architecture) / memory,
        "decode_context_s": kv_bytes(config, architecture) / memory,
        "decode_flops_s": flops_s,
        "prefill_call_s": step_s,
        "prefill_token_s": flops_s + sums_s,
        "prefill_square_s": _pair_flops(a) / num_ranks / (gpu.flops[generator.dtype] * EFFICIENCY),
    }


def _trainer(config: Config, architecture: Architecture) -> dict[str, Any]:
    a, trainer, count = architecture, config.trainer, sizes(architecture)
    gpu, tensor = hardware.gpu(config.cluster.planned_gpu, trainer.device), trainer.tensor_parallel
    peak = gpu.flops[trainer.compute_dtype] * EFFICIENCY
    checkpointing = trainer.activation_checkpointing
    num_passes = 4 if checkpointing == "full" else 3  # a backward is two
    flops_s = 2 * num_passes * (count.layers + count.head) / tensor / peak
    # Sequence parallel: two gathers and two reduce-scatters of the tokens per layer, forward and
    # backward. Full checkpointing repeats those of the forward pass, selective its gathers.
    num_moves = {"none": 8, "selective": 10, "full": 12}[checkpointing]
    moved = num_moves * a.num_layers * a.hidden_size * DTYPE_BYTES[trainer.compute_dtype]
    tensor_s = moved * (tensor - 1) / tensor / _collective_rate(config, gpu, tensor)
    forward_square_s = _pair_flops(a) / tensor / peak
    gather_s, reduce_s = _sharding(config, architecture, gpu)
    num_gathers = {"forward": 2, "backward": 1, "step": 0}[trainer.reshard_after]
    hidden_s = num_gathers * gather_s + reduce_s
    local = count.total / (trainer.num_shard_ranks * tensor)
    memory = gpu.memory_bytes_per_s * EFFICIENCY
    return {
        "token_s": flops_s + tensor_s,
        "square_s": num_passes * forward_square_s,
        "hidden_s": hidden_s,
        "micro_batch_s": hidden_s / a.num_layers,  # the first layer's has nothing to hide behind
        "forward_share": 1 / num_passes,
        # AdamW reads weights, gradients and both moments, and writes all but the gradients.
        "optimizer_s": 7 * MASTER_BYTES * local / memory
        + (gather_s if trainer.reshard_after == "step" else 0.0),
        "snapshot_s": 2 * MASTER_BYTES * local / memory,
        "infer_token_s": (flops_s + tensor_s) / num_passes / trainer.num_data_ranks,
        "infer_square_s": forward_square_s / trainer.num_data_ranks,
    }


def _pair_flops(architecture: Architecture) -> float:
    """Arithmetic of attention in a forward pass over a rollout, by the square of its length:
    scores and values of all layers, causal, so half of all pairs."""
    a = architecture
    return 2 * a.num_layers * a.num_heads * a.head_dim


def _collective_rate(config: Config, gpu: hardware.Gpu, num_ranks: int, stride: int = 1) -> float:
    """Bytes per second that one rank gets in a collective of `num_ranks` ranks, `stride` devices
    apart.

    Within a host the links carry it. Between hosts the network cards of all the group's ranks on a
    host bring in what comes from others, and the links pass it on.
    """
    num_per_host = max(1, config.cluster.num_gpus_per_host // stride)
    rate = gpu.link_bytes_per_s
    if num_ranks > num_per_host:
        rate = min(rate, num_per_host * gpu.card_bytes_per_s)
    return EFFICIENCY * rate


def _sharding(config: Config, architecture: Architecture, gpu: hardware.Gpu) -> tuple[float, float]:
    """(seconds of gathering all weights once, of reducing all gradients once) on one rank."""
    trainer, count = config.trainer, sizes(architecture)
    shard, tensor = trainer.num_shard_ranks, trainer.tensor_parallel
    rate = _collective_rate(config, gpu, shard, tensor)
    elements = count.total / tensor * (shard - 1) / shard
    gather_s = elements * DTYPE_BYTES[trainer.compute_dtype] / rate
    reduce_s = elements * MASTER_BYTES / rate
    if trainer.replicate > 1:
        local_bytes = count.total / tensor / shard * MASTER_BYTES
        share = 2 * (trainer.replicate - 1) / trainer.replicate
        rate = _collective_rate(config, gpu, trainer.replicate, shard * tensor)
        reduce_s += share * local_bytes / rate
    return gather_s, reduce_s


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
