"""What runs in the processes: a trainer rank and a generator rank, by every way to publish.

The ways beside the real one are what others do, written as fast as torch allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo

from llamarl.core.config import WeightsConfig
from llamarl.publish.layout import Copy, ParameterLayout, RankLayout, Route, StagingHandle
from llamarl.publish.offload import trim
from llamarl.publish.source import Writer
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.publish.transports.mapped import MappedBlock, this_host
from weights_bench.model import (
    DTYPES,
    NUM_RANKS,
    Model,
    box_view,
    generator_layouts,
    trainer_layouts,
    values,
)

GATHERING = 1  # tag of messages to trainer rank 0


def form_group(path: str, rank: int, size: int) -> ProcessGroupGloo:
    """A gloo group on the loopback interface that meets at `path`."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=120)
    options._threads = 1
    return ProcessGroupGloo(FileStore(path, size), rank, size, options)


class TrainerRank:
    """Holds its shards, all pages touched."""

    def __init__(self, model: Model, rank: int) -> None:
        self._model, self._rank = model, rank
        self._layouts: dict[str, ParameterLayout] = {}
        self._shards: dict[str, Tensor] = {}
        self._groups: dict[str, tuple[ProcessGroupGloo, ProcessGroupGloo | None]] = {}

    def ready(self) -> None:
        """Answers once everything is imported."""

    def fill(self) -> None:
        """Allocate and write the shards, and make the writer over them."""
        self._layouts = trainer_layouts(self._model, self._rank)
        for name, layout in self._layouts.items():
            self._shards[name] = values(name, layout.boxes[0], DTYPES[self._model.dtype])
        trim()
        self._writer = Writer(self._rank, this_host(), self._shards, self._layouts)

    # the real way

    def layout(self) -> RankLayout:
        return self._writer.layout()

    def connect(self, replica: int, route: Route | None) -> None:
        self._writer.connect(replica, route)

    def label(self, version: int) -> None:
        """The shards now are `version`."""
        self._writer.tensors.label(version)

    def write(self, version: int, handles: list[StagingHandle]) -> dict[str, int]:
        return self._writer.write(version, handles)

    # memcpy

    def reserve_copy(self) -> None:
        """A shared segment as large as the shards, for `copy`."""
        num_bytes = sum(shard.nbytes for shard in self._shards.values())
        place = torch.uint8, torch.device("cpu")
        self._segment = MappedBlock(f"llamarl-bench-{self._rank}", num_bytes, *place, False)

    def copy(self) -> None:
        """Copy every shard into the segment."""
        flat, end = self._segment.flat.view(DTYPES[self._model.dtype]), 0
        for shard in self._shards.values():
            flat[end : end + shard.numel()].view(shard.shape).copy_(shard)
            end += shard.numel()

    # gather and broadcast

    def meet(self, folder: str, label: str) -> None:
        """Form the groups: the trainer's ranks; rank 0 and those who receive as `label`."""
        trainers = form_group(f"{folder}/{label}-trainers", self._rank, NUM_RANKS)
        if self._rank == 0:
            receivers = form_group(f"{folder}/{label}-all", 0, 1 + NUM_RANKS)
            self._groups[label] = trainers, receivers
        else:
            self._groups[label] = trainers, None

    def broadcast(self, label: str) -> None:
        """Parameter by parameter: whole on rank 0, from there to every receiver of `label`."""
        trainers, receivers = self._groups[label]
        for name, shard in self._shards.items():
            if receivers is None:
                trainers.send([shard], 0, GATHERING).wait()
                continue
            whole = torch.empty(self._layouts[name].shape, dtype=shard.dtype)
            whole[: len(shard)].copy_(shard)
            trainers.recv([whole[len(shard) :]], 1, GATHERING).wait()
            receivers.broadcast(whole, root=0).wait()

    # a file

    def save(self, folder: str) -> None:
        """The shards as one safetensors file, on the disk when this returns."""
        path = file_of(folder, self._rank)
        save_file(self._shards, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class GeneratorRank:
    """Holds live weights in private memory for the ways of others, and a weight buffer per real
    way."""

    def __init__(self, model: Model, rank: int) -> None:
        self._model, self._rank = model, rank
        self._dtype = DTYPES[model.dtype]
        self._layouts, self._num_elements = generator_layouts(model, rank)
        self._weight_buffers: dict[int, WeightBuffer] = {}

    def ready(self) -> None:
        """Answers once everything is imported."""

    # the real way

    def reserve_weight_buffer(self, replica: int, staging: str) -> None:
        self._weight_buffers[replica] = WeightBuffer(
            Memory(parameters=self._layouts, num_elements=self._num_elements, dtype=self._dtype),
            WeightsConfig(staging=staging),
            replica=replica,
            rank=self._rank,
            run_id="bench",
        )
        self._weight_buffers[replica].active.fill_(
            1
        )  # the pages of a rank that decodes are touched

    def layout(self, replica: int) -> RankLayout:
        return self._weight_buffers[replica].layout()

    def connect(self, replica: int, route: Route) -> None:
        self._weight_buffers[replica].connect(route)

    def prepare(self, replica: int, version: int) -> StagingHandle:
        return self._weight_buffers[replica].prepare(version)

    def verify(self, replica: int, version: int) -> dict[str, int]:
        return self._weight_buffers[replica].verify(version)

    def commit(self, replica: int, version: int) -> int:
        self._weight_buffers[replica].commit(version)
        return 0

    def abort(self, replica: int, version: int) -> None:
        self._weight_buffers[replica].abort(version)

    # gather and broadcast, a file

    def reserve(self) -> None:
        """Private memory for the weights, touched."""
        self._flat = torch.zeros(self._num_elements, dtype=self._dtype).fill_(1)

    def meet(self, folder: str, label: str) -> None:
        self._group = form_group(f"{folder}/{label}-all", 1 + self._rank, 1 + NUM_RANKS)

    def receive(self) -> None:
        """Take this rank's slice of every whole parameter that comes."""
        for name, whole in received(self._group, self._model):
            box = self._layouts[name].boxes[0]
            box_view(self._flat, box).copy_(whole[tuple(map(slice, box.start, box.stop))])

    def load(self, folder: str, copies: list[Copy]) -> None:
        """Read this rank's slices from the trainer's files; `copies` say what lies where."""
        files = [safe_open(file_of(folder, rank), framework="pt") for rank in range(NUM_RANKS)]
        for copy in (single for alike in copies for single in alike.each()):
            if copy.target_rank == self._rank:
                source = files[copy.source_rank].get_tensor(copy.name)  # mapped, not read
                target = self._flat.as_strided(copy.shape, copy.target_strides, copy.target_offset)
                target.copy_(source.as_strided(copy.shape, copy.source_strides, copy.source_offset))

    # whether it is right

    def wipe(self, replica: int | None = None) -> None:
        """Zero what the next publish should write."""
        (self._flat if replica is None else self._weight_buffers[replica].active).zero_()

    def check(self, replica: int | None = None) -> None:
        """RuntimeError unless the live weights are what the trainer holds."""
        flat = self._flat if replica is None else self._weight_buffers[replica].active
        for name, layout in self._layouts.items():
            for box in layout.boxes:
                if not torch.equal(box_view(flat, box), values(name, box, self._dtype)):
                    raise RuntimeError(f"{name} did not arrive as it was sent")


def received(group: ProcessGroupGloo, model: Model) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters, as rank 0 of the group broadcasts them."""
    for name, shape in model.shapes.items():
        whole = torch.empty(shape, dtype=DTYPES[model.dtype])
        group.broadcast(whole, root=0).wait()
        yield name, whole


def file_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"weights-{rank}.safetensors"
