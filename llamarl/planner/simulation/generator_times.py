"""What an engine's steps take: reading weights and keys, arithmetic, sampling, collectives.

Owns: the costs of decode steps and prefills of one replica. Does not own: constants
(`efficiency.py`, `hardware.py`), bytes in memory (`memory/`) or which rollouts run together
(`slots.py`). Invariant: a product whose weights are read and whose arithmetic take about as long
takes longer than either (their root of squares); reading keys comes on top, as attention is a
kernel of its own."""

import math
from typing import Any

from llamarl.core.config import Config, EmbeddedConfig, GeneratorConfig, VllmConfig
from llamarl.generator.vllm.limits import kv_item_bytes, kv_tokens
from llamarl.model.architecture import Architecture
from llamarl.planner import hardware
from llamarl.planner.efficiency import (
    ALL_REDUCE_S,
    COLLECTIVE_S,
    EAGER_KERNELS,
    ENGINE,
    ENGINE_ROW_S,
    ENGINE_STEP_S,
    FUSED_KERNELS,
    GRAPH_KERNEL_S,
    LAUNCH_S,
    LAW,
    SAMPLING_TOUCHES,
)
from llamarl.planner.simulation import collectives
from llamarl.planner.simulation.trainer_times import gemm_flops, pair_flops, sizes, touched_bytes
from llamarl.publish.reshard import DTYPE_BYTES

QUANTIZED_BYTES = 1


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
    item = DTYPE_BYTES[generator.dtype]
    if isinstance(generator, VllmConfig):
        item = kv_item_bytes(generator)
    return 2 * a.num_layers * num_heads * a.head_dim * item


def has_graphs(generator: GeneratorConfig) -> bool:
    """Whether decode steps are replayed as captured graphs."""
    is_able = not isinstance(generator, EmbeddedConfig) or generator.num_ranks == 1
    return is_able and not generator.enforce_eager


def generator_times(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Fields of `Costs`."""
    a, generator, count = architecture, config.generator, sizes(architecture)
    num_ranks, dtype = generator.num_ranks, generator.dtype
    gpu = hardware.gpu(config.cluster.planned_gpu, generator.device)
    memory = gpu.memory_bytes_per_s
    is_fp8 = generator.quantization.startswith("fp8") and "fp8" in gpu.flops
    flops = gemm_flops(gpu, "fp8" if is_fp8 else dtype, a, num_ranks)
    layers_s = 2 * count.layers / num_ranks / flops
    head_s = 2 * count.head / num_ranks / (gpu.flops[dtype] * gpu.gemm * LAW.gemm)
    # The residual stream is whole on every rank, all else is cut.
    item = DTYPE_BYTES[dtype]
    touched = touched_bytes(a, ENGINE, item) / num_ranks
    touched += a.num_layers * item * ENGINE.hidden * a.hidden_size * (1 - 1 / num_ranks)
    elementwise_s = touched / (memory * LAW.elementwise)
    # Logits are gathered, and every rank samples.
    sampling_s = SAMPLING_TOUCHES * 4 * a.vocab_size / (memory * LAW.elementwise)
    num_sums = 2 * a.num_layers if num_ranks > 1 else 0
    row_bytes = a.hidden_size * item
    rate = collectives.rate(config, gpu, num_ranks)
    sums_s = num_sums * 2 * (num_ranks - 1) / num_ranks * row_bytes / rate
    is_graph = has_graphs(generator)
    start_s = ALL_REDUCE_S if is_graph else COLLECTIVE_S
    step_s = num_sums * collectives.latency_s(config, num_ranks, start_s) + ENGINE_STEP_S
    if is_graph:
        step_s += a.num_layers * FUSED_KERNELS * GRAPH_KERNEL_S
    kernel = hardware.FLASH3 if isinstance(generator, VllmConfig) else hardware.FLASH2
    return {
        "decode_step_s": step_s,
        "decode_row_s": sums_s + elementwise_s + sampling_s + ENGINE_ROW_S,
        "decode_read_s": generator_bytes(config, architecture) / (memory * LAW.read),
        "decode_context_s": math.hypot(
            kv_bytes(config, architecture) / (memory * LAW.read),
            2 * pair_flops(a) / num_ranks / (gpu.flops[dtype] * LAW.decode_attention),
        ),
        "decode_flops_s": layers_s + head_s,
        "decode_launch_s": 0.0 if is_graph else a.num_layers * EAGER_KERNELS * LAUNCH_S,
        "prefill_call_s": step_s,
        "prefill_token_s": layers_s + sums_s + elementwise_s,
        "prefill_square_s": pair_flops(a) / num_ranks / gpu.attention_flops(kernel, dtype),
        "kv_tokens": kv_tokens(generator, a) if isinstance(generator, VllmConfig) else 0,
    }
