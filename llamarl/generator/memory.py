"""The memory of generator ranks, computed before there is any process: weight buffers with their
layouts, staging, KV cache and working memory of the fullest rank, for both engines.

vLLM's own layout is recorded from its loader while it runs. Here it gets the equivalent one: the
same boxes of q, k, v, o, gate, up and down, row after row; key-value heads repeat where there are
more ranks than heads. It differs in the last ranks' share of embedding and head (vLLM pads the
vocabulary to whole 64s) and in offsets, neither of which changes who sends what by more than that
padding. Where it keeps its own weights these are as large as the staging memory that they are
copied from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from llamarl.core.config import Config, EmbeddedConfig, VllmConfig
from llamarl.core.config.generator import alone, pool_at
from llamarl.core.config.rank_assignment import assign
from llamarl.core.device.hardware import Kinds
from llamarl.core.device.names import is_gpu
from llamarl.generator.engine.engine import PREFILL_TOKENS
from llamarl.generator.engine.kv_cache import CpuKVCache, PaddedKVCache
from llamarl.generator.engine.weights import AdapterLayout, BufferLayout, rank_box
from llamarl.model.adapter_inventory import adapter_shapes
from llamarl.model.architecture import DOWN, Architecture, is_stacked
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import (
    BUFFER,
    MESSAGE_BYTES,
    ParameterLayout,
    RankLayout,
    format_of,
    quantized_parameters,
)
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.shards import Shape, one_box, rank_layout
from llamarl.publish.target import Memory, MemoryPlan
from llamarl.publish.transports.routes import TRANSPORTS

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GeneratorMemory:
    """The bytes of a generator rank, by kind. `weights` and `kv_cache` leave the device while
    another executor has it, and `kept` bytes of the weights keep their content; `working` is there
    during decoding; `host` lies in host memory."""

    weights: Kinds
    kept: int
    kv_cache: int
    working: Kinds
    host: Kinds


def forecast_generator(config: Config, architecture: Architecture) -> GeneratorMemory:
    """Return the memory of the fullest rank."""
    generator = config.generator
    ranks = range(generator.num_ranks)
    num_bytes = max(published_buffer(config, architecture, rank).num_bytes for rank in ranks)
    weights: Kinds = {}
    kept = num_bytes
    if config.trainer.lora.is_used:  # the weights beside adapters are the engine's own
        weights["base"] = max(weight_buffer(config, architecture, rank).num_bytes for rank in ranks)
        kept += weights["base"]
    host: Kinds = {}
    in_host = config.weights.staging == "host" and is_gpu(generator.device)
    staging = host if in_host else weights
    weights["weights"] = num_bytes
    staging["staging"] = num_bytes
    return GeneratorMemory(
        weights=weights,
        kept=kept,
        kv_cache=kv_cache_bytes(config, architecture),
        working=_working(config, architecture),
        host=host,
    )


def kv_cache_bytes(config: Config, architecture: Architecture) -> int:
    """Return the bytes of one rank's KV cache."""
    generator = config.generator
    if isinstance(generator, VllmConfig):
        return generator.kv_cache_bytes
    assert isinstance(generator, EmbeddedConfig)
    cache = (PaddedKVCache if is_gpu(generator.device) else CpuKVCache)(
        architecture, generator, generator.num_ranks, torch.device("meta")
    )
    return cache.keys.nbytes + cache.values.nbytes + cache.experts.nbytes


def _working(config: Config, architecture: Architecture) -> Kinds:
    """Return the bytes of one layer of the largest prefill (residual, its norm and a copy of each,
    q, k, v twice, three of the feed-forward), and of float32 logits of all slots with their
    probabilities and a copy."""
    generator, a = config.generator, architecture
    item = DTYPE_BYTES[generator.dtype]
    tokens = generator.max_num_seqs * generator.max_model_len
    tokens = min(tokens, max(PREFILL_TOKENS, generator.max_model_len))
    split = 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 3 * a.active_channels
    if a.experts is not None:  # each token once per expert: sent, received, and summed in float32
        split += a.experts.num_chosen * a.hidden_size * 4
    kinds = {
        "activations": tokens * item * (4 * a.hidden_size + split // generator.num_ranks),
        "logits": 3 * FLOAT32_BYTES * generator.max_num_seqs * a.vocab_size,
    }
    if not TRANSPORTS[config.weights.transport].is_mapped:
        kinds["transfer"] = 2 * MESSAGE_BYTES
    return kinds


def generator_layouts(
    config: Config, architecture: Architecture, replica: int = 0
) -> list[RankLayout]:
    """Return the layout of each rank of a replica, in order of rank, as one bucket."""
    own = alone(config, pool_at(config.generator, replica))
    devices = assign(config)[f"generator-{replica}"]
    return [
        rank_layout(rank, device, published_buffer(own, architecture, rank).parameters)
        for rank, device in enumerate(devices)
    ]


def published_buffer(config: Config, architecture: Architecture, rank: int) -> Memory:
    """Return the memory that a publish fills on a generator rank: adapters, or all weights."""
    generator, lora = config.generator, config.trainer.lora
    if not lora.is_used:
        return weight_buffer(config, architecture, rank)
    if isinstance(generator, VllmConfig):
        plain = replace(generator, quantization="none")
        return _vllm_weight_buffer(architecture, plain, rank, adapter_shapes(architecture, lora))
    place = generator.dtype, rank, generator.num_ranks
    return AdapterLayout(architecture, lora, *place).memory


def weight_buffer(config: Config, architecture: Architecture, rank: int) -> Memory:
    """Return the memory of all weights of one generator rank."""
    generator = config.generator
    if isinstance(generator, VllmConfig):
        shapes = parameter_shapes(architecture)
        return _vllm_weight_buffer(architecture, generator, rank, shapes)
    form = format_of(generator, architecture)
    place = generator.dtype, rank, generator.num_ranks
    return BufferLayout(architecture, *place, form).memory


def _vllm_weight_buffer(
    architecture: Architecture, generator: VllmConfig, rank: int, shapes: Mapping[str, Shape]
) -> Memory:
    """Return the memory of one vLLM rank, its parameters one after the other: see the module."""
    form = format_of(generator, architecture)
    made = {} if form is None else {e.base: e for e in quantized_parameters(shapes, form)}
    plan = MemoryPlan()

    def put(name: str, shape: Shape, box: tuple[Shape, Shape], dtype: str) -> None:
        plan.put(name, shape, box, dtype, plan.reserve(name, box[0], dtype).offset)

    for name, shape in shapes.items():
        if is_stacked(name):
            plan.parameters[name] = _part_of_experts(plan, name, shape, rank, generator)
            continue
        size, start = rank_box(architecture, name, shape, rank, generator.num_ranks)
        if name not in made:
            put(name, shape, (size, start), generator.dtype)
            continue
        each = made[name]
        put(each.values, shape, (size, start), each.format.dtype)
        if not each.format.is_per_tensor:
            put(each.scales, shape[:-1], (size[:-1], start[:-1]), each.format.scale_dtype)
        elif each.scales not in plan.parameters:
            put(each.scales, (1,), ((1,), (0,)), each.format.scale_dtype)
    return plan.memory()


def _part_of_experts(
    plan: MemoryPlan, name: str, shape: Shape, rank: int, generator: VllmConfig
) -> ParameterLayout:
    """Reserve a rank's part of stacked experts, and return its boxes: with expert parallel it has
    whole ones; else of gate and up the same channels, and of down those channels' columns."""
    experts, rows, columns = shape
    num_ranks, dtype = generator.num_ranks, generator.dtype
    if generator.expert_parallel:
        size, starts = (experts // num_ranks, rows, columns), [(rank * experts // num_ranks, 0, 0)]
    elif name.endswith(DOWN):
        size, starts = (experts, rows, columns // num_ranks), [(0, 0, rank * columns // num_ranks)]
    else:
        inner = rows // 2
        size = (experts, inner // num_ranks, columns)
        starts = [(0, first + rank * inner // num_ranks, 0) for first in (0, inner)]
    height, width = len(starts) * size[1], size[2]
    place = plan.reserve(name, (size[0], height, width), dtype)
    strides = (height * width, width, 1)
    boxes = tuple(
        one_box(shape, size, start, dtype, BUFFER, place.offset + i * size[1] * width, strides)
        for i, start in enumerate(starts)
    )
    return replace(boxes[0], boxes=tuple(each.boxes[0] for each in boxes))
