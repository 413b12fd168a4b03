"""What every rank holds of every parameter, without any process.

Owns: layouts of trainer and generator ranks as they will be, and their sizes. Does not own: how a
model is cut (`trainer/parallel.py`, `generator/engine/weights.py`) or what else lies in memory
(`ranks.py`). Invariant: boxes come from torch's own computation on the real placements, and equal
those that running ranks report (`publish/shards.py`, an engine's weight buffer), but for the
host's name.

Where all layers look alike, callers ask for an architecture of one layer.

vLLM's own layout is recorded from its loader while it runs. Here it gets the equivalent one: the
same boxes of q, k, v, o, gate, up and down, row after row; key-value heads repeat where there are
more ranks than heads. It differs in the last ranks' share of embedding and head (vLLM pads the
vocabulary to whole 64s) and in offsets, neither of which changes who sends what by more than that
padding.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from llamarl.core.config import Config, VllmConfig
from llamarl.core.config.generator import alone, pool_at
from llamarl.core.config.rank_assignment import Device, assign
from llamarl.generator.adapter_layout import AdapterLayout
from llamarl.generator.engine.weights import BufferLayout
from llamarl.model.adapter_inventory import adapter_shapes, trained_shapes
from llamarl.model.architecture import Architecture, split_dimension
from llamarl.model.inventory import parameter_shapes
from llamarl.publish.layout import (
    BUFFER,
    Box,
    ParameterLayout,
    RankLayout,
    format_of,
    quantized_parameters,
)
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.trainer.parallel import parameter_placements

Shape = tuple[int, ...]


def trainer_layouts(config: Config, architecture: Architecture) -> list[RankLayout]:
    """The layout of each trainer rank, as `shard_boxes` makes it there, in order of rank."""
    layout = lru_cache(maxsize=None)(_layout)  # ranks that hold the same share it
    trained = trained_shapes(architecture, config.trainer.lora)
    return [
        rank_layout(
            rank,
            device,
            {
                name: layout(shape, size, start, "float32", name, 0)
                for name, shape, size, start in _local_boxes(config, architecture, rank)
                if name in trained
            },
        )
        for rank, device in enumerate(assign(config)["trainer"])
    ]


def generator_layouts(
    config: Config, architecture: Architecture, replica: int = 0
) -> list[RankLayout]:
    """The layout of each rank of a replica, in order of rank."""
    own = alone(config, pool_at(config.generator, replica))
    devices = assign(config)[f"generator-{replica}"]
    return [
        rank_layout(rank, device, published_buffer(own, architecture, rank)[0])
        for rank, device in enumerate(devices)
    ]


def published_buffer(
    config: Config, architecture: Architecture, rank: int
) -> tuple[dict[str, ParameterLayout], int]:
    """(boxes by parameter, bytes in all) of the memory that a publish fills on a generator rank:
    adapters, or all weights."""
    generator, lora = config.generator, config.trainer.lora
    if not lora.is_used:
        return weight_buffer(config, architecture, rank)
    if isinstance(generator, VllmConfig):
        plain = replace(generator, quantization="none")
        return _vllm_weight_buffer(architecture, plain, rank, adapter_shapes(architecture, lora))
    place = generator.dtype, rank, generator.num_ranks
    memory = AdapterLayout(architecture, lora, *place).memory
    return memory.parameters, memory.num_elements * memory.dtype.itemsize


def weight_buffer(
    config: Config, architecture: Architecture, rank: int
) -> tuple[dict[str, ParameterLayout], int]:
    """The same of all weights of one generator rank."""
    generator = config.generator
    if isinstance(generator, VllmConfig):
        shapes = parameter_shapes(architecture)
        return _vllm_weight_buffer(architecture, generator, rank, shapes)
    form = format_of(generator, architecture)
    layout = BufferLayout(architecture, generator.dtype, rank, generator.num_ranks, form)
    memory = layout.memory
    return memory.parameters, memory.num_elements * memory.dtype.itemsize


def local_elements(config: Config, architecture: Architecture, rank: int) -> dict[str, int]:
    """Parameter name -> elements that trainer rank `rank` holds of it."""
    boxes = _local_boxes(config, architecture, rank)
    return {name: math.prod(size) for name, _, size, _ in boxes}


def _local_boxes(
    config: Config, architecture: Architecture, rank: int
) -> Iterator[tuple[str, Shape, Shape, Shape]]:
    """(name, shape, shape and first index of what the trainer rank holds) of each parameter."""
    shapes = parameter_shapes(architecture) | adapter_shapes(architecture, config.trainer.lora)
    for name, (mesh, kinds) in parameter_placements(architecture, config.trainer).items():
        place = tuple(map(int, np.unravel_index(rank, mesh)))  # meshes count row after row
        yield name, shapes[name], *local_box(shapes[name], mesh, place, kinds)


def local_box(
    shape: Shape, mesh: Shape, place: Shape, placements: tuple[Placement, ...]
) -> tuple[Shape, Shape]:
    """(shape, first index) of what the rank at `place` holds of a parameter.

    FSDP cuts what tensor parallel, the last mesh dimension, left. Asked for both at once, torch
    lists every index of such a strided shard, which takes milliseconds; so it is asked for one
    after the other where the slices are equally long, as all models that can be run have them.
    """
    strided = [placement for placement in placements if isinstance(placement, _StridedShard)]
    if not strided or shape[strided[0].dim] % mesh[-1]:
        return _local_box(shape, mesh, place, placements)
    slice_shape, slice_start = _local_box(shape, mesh[-1:], place[-1:], placements[-1:])
    plain = tuple(
        Shard(placement.dim) if isinstance(placement, _StridedShard) else placement
        for placement in placements[:-1]
    )
    size, start = _local_box(slice_shape, mesh[:-1], place[:-1], plain)
    return size, tuple(a + b for a, b in zip(start, slice_start, strict=True))


@lru_cache(maxsize=1 << 16)
def _local_box(
    shape: Shape, mesh: Shape, place: Shape, placements: tuple[Placement, ...]
) -> tuple[Shape, Shape]:
    size, start = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    return tuple(size), tuple(start)


def _layout(
    shape: Shape, size: Shape, start: Shape, dtype: str, buffer: str, offset: int
) -> ParameterLayout:
    """A parameter of which the rank holds one box, row after row from `offset` of its `buffer`, or
    nothing if that is empty."""
    stop = tuple(first + extent for first, extent in zip(start, size, strict=True))
    strides = torch.empty(size, device="meta").stride()
    box = Box(start=start, stop=stop, buffer=buffer, offset=offset, strides=strides)
    boxes = (box,) if math.prod(size) else ()
    return ParameterLayout(shape=shape, dtype=dtype, boxes=boxes)


def rank_layout(rank: int, device: Device, parameters: dict[str, ParameterLayout]) -> RankLayout:
    """Of a rank on `device`."""
    return RankLayout(rank=rank, host=f"host-{device.host}", parameters=parameters)


def _vllm_weight_buffer(
    architecture: Architecture, generator: VllmConfig, rank: int, shapes: Mapping[str, Shape]
) -> tuple[dict[str, ParameterLayout], int]:
    """Boxes of one vLLM rank, one after the other: see the module."""
    form = format_of(generator, architecture)
    made = {} if form is None else {e.base: e for e in quantized_parameters(shapes, form)}
    parameters: dict[str, ParameterLayout] = {}
    end = 0

    def put(name: str, shape: Shape, size: Shape, start: Shape, dtype: str) -> None:
        nonlocal end
        item = DTYPE_BYTES[dtype]
        offset = -(-end // item)
        parameters[name] = _layout(shape, size, start, dtype, BUFFER, offset)
        end = (offset + math.prod(size)) * item

    for name, shape in shapes.items():
        size, start = _vllm_box(architecture, name, shape, rank, generator.num_ranks)
        if name not in made:
            put(name, shape, size, start, generator.dtype)
            continue
        each = made[name]
        put(each.values, shape, size, start, each.format.dtype)
        if not each.format.is_per_tensor:
            put(each.scales, shape[:1], size[:1], start[:1], each.format.scale_dtype)
        elif each.scales not in parameters:
            put(each.scales, (1,), (1,), (0,), each.format.scale_dtype)
    return parameters, end


def _vllm_box(
    architecture: Architecture, name: str, shape: Shape, rank: int, num_ranks: int
) -> tuple[Shape, Shape]:
    """(shape, first index) of what a rank of vLLM holds of a parameter."""
    dim = split_dimension(name)
    start, size = [0] * len(shape), list(shape)
    if dim is not None:
        parts, part = num_ranks, rank
        is_kv = not {"k_proj", "v_proj"}.isdisjoint(name.split("."))
        if is_kv and num_ranks > architecture.num_kv_heads:
            parts = architecture.num_kv_heads
            part = rank * parts // num_ranks
        size[dim] = -(-shape[dim] // parts)
        start[dim] = min(part * size[dim], shape[dim])
        size[dim] = min(size[dim], shape[dim] - start[dim])
    return tuple(size), tuple(start)
