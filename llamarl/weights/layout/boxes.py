"""Layouts: which rank holds which box of which parameter, and where in its memory.

Owns: the records that describe both ends of a publish. Does not own: which copies there are
(`reshard.py`) or moving bytes. Invariant: a layout is data; fused, padded and sharded parameters
differ only in `offset` and `strides`.

Parameters go by their Hugging Face names on both sides. Example: `q_proj.weight` of global shape
(256, 256), the first 256 rows of a generator's fused (512, 256) qkv tensor that begins 4096
elements into its weight buffer, is `Box(start=(0, 0), stop=(256, 256), buffer=BUFFER,
offset=4096, strides=(256, 1))`; rows 128:256 of it on trainer rank 1 of 2 are `Box(start=(128, 0),
stop=(256, 256), buffer="model...q_proj.weight", offset=0, strides=(256, 1))`.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

BUFFER = "weights"  # the name of a generator rank's flat weight buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of one parameter (DCP calls it a chunk): global index ranges, and its place in a
    rank's memory.

    `offset` and `strides` count elements of the parameter's dtype, from the start of `buffer`.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: str
    offset: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How long the box is in each dimension."""
        return tuple(map(operator.sub, self.stop, self.start))

    def offset_of(self, index: tuple[int, ...]) -> int:
        """Where global `index` lies in `buffer`, in elements."""
        steps = map(operator.sub, index, self.start)
        return self.offset + sum(map(operator.mul, steps, self.strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter on one rank: global `shape`, `dtype` ("float32", "bfloat16"), boxes held."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """All parameters of one rank; `host` says whose memory it is.

    `buckets` are the names of the parameters that a target prepares, receives and commits together,
    in order; every parameter is in one of them, and all ranks of a replica have equal buckets. A
    source has one bucket. Boxes of different buckets may share staging memory.

    `frozen` are this rank's sums of weights that no publish moves, by kind and name: a target has
    those of its own kind, a source those of all.
    """

    rank: int
    host: str
    parameters: dict[str, ParameterLayout]
    buckets: tuple[tuple[str, ...], ...]
    frozen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Copy(NamedTuple):
    """One strided copy of `shape` elements of parameter `name` from a source rank to a target rank,
    repeated over layers that look alike.

    `start` is the global index of its first element, which the fingerprint needs. Strides and
    offsets count elements of the respective dtype, in the target's weight buffer from its start.

    The fields describe the first layer. In each of the other `num_layers` - 1 the layer's number in
    `name` and in `source_buffer` is `layer_step` higher than in the one before, and the offsets are
    so many elements further: `source_layer_step`, `target_layer_step`.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source_rank: int
    source_buffer: str
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: tuple[int, ...]
    target_dtype: str
    num_layers: int = 1
    layer_step: int = 0
    source_layer_step: int = 0
    target_layer_step: int = 0

    def slab(self, dim: int, begin: int, extent: int) -> Self:
        """The same from `begin` on along `dim`, `extent` long there; both may exceed its shape."""
        return self._replace(
            start=(*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :]),
            shape=(*self.shape[:dim], extent, *self.shape[dim + 1 :]),
            source_offset=self.source_offset + begin * self.source_strides[dim],
            target_offset=self.target_offset + begin * self.target_strides[dim],
        )

    def layers(self, first: int, step: int) -> Self:
        """The same in every `step`-th layer from the `first` one on, which counts from 0."""
        by = first * self.layer_step
        return self._replace(
            name=in_layer(self.name, by),
            source_buffer=in_layer(self.source_buffer, by),
            source_offset=self.source_offset + first * self.source_layer_step,
            target_offset=self.target_offset + first * self.target_layer_step,
            num_layers=len(range(first, self.num_layers, step)),
            layer_step=step * self.layer_step,
            source_layer_step=step * self.source_layer_step,
            target_layer_step=step * self.target_layer_step,
        )

    def each(self) -> Iterator[Self]:
        """The copies of the single layers, in order."""
        if self.num_layers == 1:
            yield self
            return
        names = _in_layers(self.name, self.num_layers, self.layer_step)
        buffers = _in_layers(self.source_buffer, self.num_layers, self.layer_step)
        one = type(self)
        source, target = self.source_offset, self.target_offset
        for name, buffer in zip(names, buffers, strict=True):
            yield one(
                name, self.start, self.shape,
                self.source_rank, buffer, source, self.source_strides,
                self.target_rank, target, self.target_strides, self.target_dtype,
            )  # fmt: skip
            source += self.source_layer_step
            target += self.target_layer_step


_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def layer_of(name: str) -> tuple[str, int] | None:
    """(the name with its layer's number, the first between two dots, left out; that number)."""
    found = _LAYER.search(name)
    if found is None or found[0] != str(int(found[0])):
        return None
    return f"{name[: found.start()]}{name[found.end() :]}", int(found[0])


@lru_cache(maxsize=1 << 14)
def in_layer(name: str, by: int) -> str:
    """The name in the layer whose number is `by` higher; the same if it has no layer."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), name, count=1)


@lru_cache(maxsize=4096)  # the copies of all ranks have the same names
def _in_layers(name: str, count: int, step: int) -> tuple[str, ...]:
    return tuple(in_layer(name, index * step) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the bytes of one source executor reach one replica, as one of their ranks sees it: the
    `copies` that begin or end there, over `transport`.

    `source` names the executor ("trainer", or "generator-0" that passes on what it received).
    `sources` and `targets` are the ranks that send and receive anything. `buckets` are those of the
    target's layouts; () if there is one only. `rendezvous` is where the ranks of a collective route
    meet: a file path that no other route uses; else "". `bucket_bytes` is the largest message of a
    packed transport. `is_slow`: it leads to another site.
    """

    source: str
    replica: int
    transport: str
    copies: tuple[Copy, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    buckets: tuple[tuple[str, ...], ...] = ()
    rendezvous: str = ""
    bucket_bytes: int = 1 << 25
    is_slow: bool = False

    def by_bucket(self) -> list[list[Copy]]:
        """The copies of the single layers, by bucket; the order within one is that of `copies`."""
        copies = (single for copy in self.copies for single in copy.each())
        if not self.buckets:
            return [list(copies)]
        bucket_of = {name: i for i, names in enumerate(self.buckets) for name in names}
        found: list[list[Copy]] = [[] for _ in self.buckets]
        for copy in copies:
            found[bucket_of[copy.name]].append(copy)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingHandle:
    """Staging memory of one generator rank, prepared for writing `bucket` of `version`.

    `address` is what the route's transport needs to reach it: a path (shared_memory), a handle
    (cuda_ipc), handles by source rank (rdma), or None (collective: the rank receives by itself).
    `is_last`: no bucket follows. If
    `may_be_freed`, the owner may free the memory between two writes, when others need the device: a
    process that has mapped it unmaps it after the write.
    """

    version: int
    bucket: int
    replica: int
    rank: int
    host: str
    address: object
    num_bytes: int
    is_last: bool = True
    may_be_freed: bool = False
