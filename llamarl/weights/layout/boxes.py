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
from dataclasses import dataclass, replace
from typing import Self

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
    """

    rank: int
    host: str
    parameters: dict[str, ParameterLayout]
    buckets: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One strided copy of `shape` elements of parameter `name` from a source rank to a target rank.

    `start` is the global index of its first element, which the fingerprint needs. Strides and
    offsets count elements of the respective dtype, in the target's weight buffer from its start.
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

    def slab(self, dim: int, begin: int, extent: int) -> Self:
        """The same from `begin` on along `dim`, `extent` long there; both may exceed its shape."""
        start = (*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :])
        return replace(
            self,
            start=start,
            shape=(*self.shape[:dim], extent, *self.shape[dim + 1 :]),
            source_offset=self.source_offset + begin * self.source_strides[dim],
            target_offset=self.target_offset + begin * self.target_strides[dim],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the bytes of one source executor reach one replica: all `copies`, over `transport`.

    `source` names the executor ("trainer", or "generator-0" that passes on what it received).
    `rendezvous` is where the ranks of a collective route meet: a file path that no other route
    uses; else "". `bucket_bytes` is the largest message of a packed transport. `is_slow`: it leads
    to another site.
    """

    source: str
    replica: int
    transport: str
    copies: tuple[Copy, ...]
    rendezvous: str = ""
    bucket_bytes: int = 1 << 25
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingHandle:
    """Staging memory of one generator rank, prepared for writing `bucket` of `version`.

    `address` is what the route's transport needs to reach it: a path (shared_memory), a handle
    (cuda_ipc), handles by source rank (rdma), or None (collective: the rank receives by itself).
    `names` are the parameters of the bucket; () stands for all. `is_last`: no bucket follows. If
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
    names: tuple[str, ...] = ()
    is_last: bool = True
    may_be_freed: bool = False
