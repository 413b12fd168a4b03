"""What one generator rank has in memory.

Owns: weight buffer and staging, weights that are derived from it, KV cache and working memory of
the fullest rank, for both engines. Does not own: sharing a device with others (`ranks.py`).
Invariant: kinds mirror `weight_buffer.py` and the embedded engine; vLLM's memory follows its own
settings.

While the embedded engine quantises a version for a commit, it decodes with the one before: two
sets. vLLM quantises one linear layer at a time and copies it into place; out of host memory each
passes through one of two slots (`generation/vllm/staging.py`).
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from llamarl.config import Config, VllmConfig
from llamarl.device.names import is_gpu
from llamarl.generation.cpu_kv_cache import CpuKVCache
from llamarl.generation.engine import PREFILL_TOKENS
from llamarl.generation.padded_kv_cache import PaddedKVCache
from llamarl.generation.parameters import DTYPES, BufferLayout, bind, quantize, tensors
from llamarl.models.architecture import Architecture
from llamarl.models.families import FUSED, LINEARS
from llamarl.planner.memory.shardings import weight_buffer
from llamarl.planner.memory.trainer_memory import Kinds
from llamarl.weights.layout import buckets
from llamarl.weights.layout.reshard import DTYPE_BYTES
from llamarl.weights.transports.registry import TRANSPORTS

LINEAR_WEIGHTS = tuple(f"{name}.weight" for name in LINEARS)
FUSED_INTO = {part: whole for whole, parts in FUSED.items() for part in parts}
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GeneratorMemory:
    """Bytes by kind. `weights` and `kv_cache` leave the device while another executor has it, and
    `kept` bytes of the weights keep their content; `working` is there during decoding; `host` lies
    in host memory."""

    weights: Kinds
    kept: int
    kv_cache: int
    working: Kinds
    host: Kinds


def forecast_generator(config: Config, architecture: Architecture) -> GeneratorMemory:
    """Of the fullest rank."""
    generator = config.generator
    item = DTYPE_BYTES[generator.dtype]
    buffers = (weight_buffer(config, architecture, rank) for rank in range(generator.num_ranks))
    parameters, num_elements = max(buffers, key=lambda each: each[1])
    weights: Kinds = {}
    host: Kinds = {}
    in_host = config.weights.staging == "host" and is_gpu(generator.device)
    staging = host if in_host else weights
    if generator.quantization == "none":
        weights["weights"] = kept = num_elements * item
        size = num_elements
        if config.weights.staging == "bucket":
            cut = buckets.cut_buckets(parameters, max(1, config.weights.bucket_bytes // item))
            size = max(bucket.end - bucket.begin for bucket in cut)
        staging["staging"] = size * item
    else:
        if isinstance(generator, VllmConfig):
            derived = vllm_quantized_bytes(config, architecture)
            num_slots = 2 if in_host else 0
            weights["preparation"] = _largest_linear(config, architecture) * (1 + num_slots * item)
        else:
            derived = quantized_bytes(architecture, generator.dtype, generator.num_ranks)
            weights["preparation"] = derived
        weights["weights"] = derived
        staging["staging"] = num_elements * item
        kept = derived + (0 if in_host else num_elements * item)
    return GeneratorMemory(
        weights=weights,
        kept=kept,
        kv_cache=kv_cache_bytes(config, architecture),
        working=_working(config, architecture),
        host=host,
    )


def kv_cache_bytes(config: Config, architecture: Architecture) -> int:
    """Of one rank."""
    generator = config.generator
    if isinstance(generator, VllmConfig):
        return generator.kv_cache_bytes
    cache = (PaddedKVCache if is_gpu(generator.device) else CpuKVCache)(
        architecture,
        generator.num_ranks,
        generator.max_num_seqs,
        generator.max_model_len,
        DTYPES[generator.dtype],
        torch.device("meta"),
    )
    return cache.keys.nbytes + cache.values.nbytes


def quantized_bytes(architecture: Architecture, dtype: str, num_ranks: int) -> int:
    """Of one set of the embedded engine's weights in eight bits."""
    layout = BufferLayout(architecture, dtype, 0, num_ranks)
    flat = torch.empty(layout.num_elements, dtype=DTYPES[dtype], device="meta")
    made = quantize(bind(layout, architecture, flat), "int8", flat)
    return sum(tensor.nbytes for tensor in tensors(made))


def vllm_quantized_bytes(config: Config, architecture: Architecture) -> int:
    """Of vLLM's weights in fp8: linear layers in one byte, with float32 scales per output; all
    else, embedding and head too, as it was."""
    parameters, _ = weight_buffer(config, architecture, 0)
    item, total = DTYPE_BYTES[config.generator.dtype], 0
    for name, layout in parameters.items():
        shapes = [box.shape for box in layout.boxes]
        num_elements = sum(math.prod(shape) for shape in shapes)
        if name.endswith(LINEAR_WEIGHTS):
            total += num_elements + FLOAT32_BYTES * sum(shape[0] for shape in shapes)
        else:
            total += num_elements * item
    return total


def _largest_linear(config: Config, architecture: Architecture) -> int:
    """Elements of the largest linear layer that vLLM quantises, which are fused."""
    parameters, _ = weight_buffer(config, architecture, 0)
    sizes: Counter[str] = Counter()
    for name, layout in parameters.items():
        if ".layers.0." in name and name.endswith("_proj.weight"):
            module = ".".join(name.split(".")[-3:-1])
            num_elements = sum(math.prod(box.shape) for box in layout.boxes)
            sizes[FUSED_INTO.get(module, module)] += num_elements
    return max(sizes.values())


def _working(config: Config, architecture: Architecture) -> Kinds:
    """One layer of the largest prefill (residual, its norm and a copy of each, q, k, v twice, three
    of the feed-forward), float32 logits of all slots with their probabilities and a copy."""
    generator, a = config.generator, architecture
    item = DTYPE_BYTES[generator.dtype]
    tokens = generator.max_num_seqs * generator.max_model_len
    tokens = min(tokens, max(PREFILL_TOKENS, generator.max_model_len))
    split = 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 3 * a.intermediate_size
    kinds = {
        "activations": tokens * item * (4 * a.hidden_size + split // generator.num_ranks),
        "logits": 3 * FLOAT32_BYTES * generator.max_num_seqs * a.vocab_size,
    }
    if not TRANSPORTS[config.weights.transport].is_mapped:
        kinds["transfer"] = 2 * config.weights.bucket_bytes
    return kinds
