"""Layouts: which rank holds which box of which parameter, and where in its memory.

Owns: the records that describe both ends of a publish. Does not own: planning (`plan.py`) or
moving bytes. Invariant: a layout is data; fused, padded and sharded parameters differ only in
`offset` and `strides`.

Parameters go by their Hugging Face names on both sides. Example: `q_proj.weight` of global shape
(256, 256), the first 256 rows of a generator's fused (512, 256) qkv tensor that begins 4096
elements into its arena, is `Box(start=(0, 0), stop=(256, 256), buffer="arena", offset=4096,
strides=(256, 1))`; rows 128:256 of it on trainer rank 1 of 2 are `Box(start=(128, 0),
stop=(256, 256), buffer="model...q_proj.weight", offset=0, strides=(256, 1))`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of one parameter: global index ranges, and its place in a rank's memory.

    `offset` and `strides` count elements of the parameter's dtype, from the start of `buffer`.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter on one rank: global `shape`, `dtype` ("float32", "bfloat16"), boxes held."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """All parameters of one rank; `host` says whose memory it is."""

    rank: int
    host: str
    parameters: dict[str, ParameterLayout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One strided copy of `shape` elements of parameter `name` from a source rank to a target rank.

    `start` is the box's global index, which the fingerprint needs. Strides and offsets count
    elements of the respective dtype.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source_rank: int
    source_buffer: str
    source_offset: int
    source_strides: tuple[int, ...]
    target_rank: int
    target_buffer: str
    target_offset: int
    target_strides: tuple[int, ...]
    target_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Memory of one generator rank, open for writing `version`: a shared memory `segment`."""

    version: int
    replica: int
    rank: int
    host: str
    segment: str
    num_bytes: int
