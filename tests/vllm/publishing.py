"""A publish without processes: uneven trainer shards, the planner, and its copies."""

from __future__ import annotations

import torch

from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout
from llamarl.weights.layout.buckets import Memory
from llamarl.weights.layout.reshard import plan


def uneven_source(weights: dict[str, torch.Tensor]) -> tuple[list[RankLayout], list[dict]]:
    """The weights cut over three ranks, one row, then a third, then the rest of each."""
    layouts, memories = [], []
    for rank in range(3):
        parameters, memory = {}, {}
        for name, tensor in weights.items():
            rows = tensor.shape[0]
            cuts = [0, 1, 1 + (rows - 1) // 3, rows]
            start = (cuts[rank], *[0] * (tensor.ndim - 1))
            stop = (cuts[rank + 1], *tensor.shape[1:])
            memory[name] = tensor[cuts[rank] : cuts[rank + 1]].clone()
            strides = memory[name].stride()
            box = Box(start=start, stop=stop, buffer=name, offset=0, strides=strides)
            parameters[name] = ParameterLayout(
                shape=tuple(tensor.shape), dtype="float32", boxes=(box,)
            )
        names = (tuple(weights),)
        layouts.append(RankLayout(rank=rank, host="here", parameters=parameters, buckets=names))
        memories.append(memory)
    return layouts, memories


def publish(memories: list[Memory], weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the planner's copies leave in the flat memory of each rank of one replica."""
    source, held = uneven_source(weights)
    target = [
        RankLayout(
            rank=rank,
            host="here",
            parameters=memory.parameters,
            buckets=(tuple(memory.parameters),),
        )
        for rank, memory in enumerate(memories)
    ]
    flats = [torch.zeros(memory.num_elements, dtype=memory.dtype) for memory in memories]
    for copy in (single for alike in plan(source, target) for single in alike.each()):
        read = held[copy.source_rank][copy.source_buffer]
        flats[copy.target_rank].as_strided(
            copy.shape, copy.target_strides, copy.target_offset
        ).copy_(read.as_strided(copy.shape, copy.source_strides, copy.source_offset))
    return flats
