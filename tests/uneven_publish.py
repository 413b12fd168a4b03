"""A publish without processes: uneven trainer shards, the planner, and its copies."""

from __future__ import annotations

import torch

from llamarl.publish.layout import Box, Format, ParameterLayout, RankLayout
from llamarl.publish.reshard import plan
from llamarl.publish.shards import ShardScales
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory


def uneven_source(
    weights: dict[str, torch.Tensor], *, is_cut: bool = True
) -> tuple[list[RankLayout], list[dict]]:
    """The weights cut over three ranks, one row, then a third, then the rest of each; or whole on
    one."""
    layouts, memories = [], []
    for rank in range(3 if is_cut else 1):
        parameters, memory = {}, {}
        for name, tensor in weights.items():
            rows = tensor.shape[0]
            cuts = [0, 1, 1 + (rows - 1) // 3, rows] if is_cut else [0, rows]
            start = (cuts[rank], *[0] * (tensor.ndim - 1))
            stop = (cuts[rank + 1], *tensor.shape[1:])
            memory[name] = tensor[cuts[rank] : cuts[rank + 1]].clone()
            strides = memory[name].stride()
            box = Box(start=start, stop=stop, buffer=name, offset=0, strides=strides)
            parameters[name] = ParameterLayout(
                shape=tuple(tensor.shape), dtype="float32", boxes=(box,)
            )
        layouts.append(RankLayout(rank=rank, host="here", parameters=parameters))
        memories.append(memory)
    return layouts, memories


def publish(
    memories: list[Memory], weights: dict[str, torch.Tensor], formats: tuple[Format, ...] = ()
) -> list[torch.Tensor]:
    """What the planner's copies leave in the flat memory of each rank of one replica.

    The source's ranks form no group, so it is one rank where one scale is that of all rows.
    """
    is_cut = not any(form.is_per_tensor for form in formats)
    source, held = uneven_source(weights, is_cut=is_cut)
    target = [
        RankLayout(
            rank=rank,
            host="here",
            parameters=memory.parameters,
        )
        for rank, memory in enumerate(memories)
    ]
    flats = [torch.zeros(memory.num_elements, dtype=memory.dtype) for memory in memories]
    writers = []
    for layout, memory in zip(source, held, strict=True):
        scales = ShardScales(layout.parameters, formats, torch.device("cpu"))
        scales.derive(memory)
        writer = Writer(layout.rank, "here", memory, layout.parameters, scales=scales)
        writer.tensors.label(0)
        writers.append(writer)
    for copy in (single for alike in plan(source, target) for single in alike.each()):
        flat = flats[copy.target_rank].view(getattr(torch, copy.target_dtype))
        values = flat.as_strided(copy.shape, copy.target_strides, copy.target_offset)
        writer = writers[copy.source_rank]
        with writer.tensors.reading(0) as tensors:
            writer._transfer(copy, tensors, values)
    return flats
