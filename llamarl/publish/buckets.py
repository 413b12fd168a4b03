"""Buckets: what of a weight buffer is prepared, written and committed together.

Every parameter is in exactly one bucket, and parameters whose extents in memory overlap (fused
q, k, v) are in the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from llamarl.publish.layout import BUFFER, Box, ParameterLayout
from llamarl.publish.reshard import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The flat memory that a publish fills for this rank: `num_elements` of `dtype`, and the
    boxes of every parameter (Hugging Face names) that the rank holds.

    Where parameters differ in dtype, as quantised matrices and their scales do, the memory is bytes
    (uint8, a multiple of ALIGN_BYTES), and a parameter is found in a view of its own dtype.

    `is_staged`: the engine makes its own weights from this memory at a commit (packed, or copied to
    where captured graphs read them); else it decodes straight from it.
    """

    parameters: dict[str, ParameterLayout]
    num_elements: int
    dtype: torch.dtype
    is_staged: bool = False


ALIGN_BYTES = 64  # a cache line, and the widest vector load
NUMBER_BYTES = 8  # the widest number: a bucket begins where any may


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters `names` and the bytes [begin, end) of the weight buffer that they lie in.

    `is_dense`: nothing lies in between that a buffer would have to keep.
    """

    names: tuple[str, ...]
    begin: int
    end: int
    is_dense: bool


def cut_buckets(parameters: Mapping[str, ParameterLayout], max_bytes: int) -> list[Bucket]:
    """Consecutive ranges of the weight buffer of at most `max_bytes`, or one set of fused
    parameters.

    In the order of memory. A parameter without elements here goes with the first bucket.
    """
    clusters: list[tuple[list[str], int, int]] = []
    for name in sorted(parameters, key=lambda name: (_extent(parameters[name]), name)):
        begin, end = _extent(parameters[name])
        if clusters and (begin < clusters[-1][2] or begin % NUMBER_BYTES or end == 0):
            names, first, last = clusters[-1]
            clusters[-1] = [*names, name], first, max(last, end)
        else:
            clusters.append(([name], begin, end))
    joined: list[tuple[list[str], int, int]] = []
    for names, begin, end in clusters:
        if joined and (end - joined[-1][1] <= max_bytes or joined[-1][2] == 0):
            joined[-1] = [*joined[-1][0], *names], joined[-1][1], end
        else:
            joined.append((names, begin, end))
    return [
        Bucket(tuple(names), begin, end, _num_bytes(parameters, names) == end - begin)
        for names, begin, end in joined
    ]


def room_bytes(cut: Sequence[Bucket]) -> int:
    """What memory for any of them takes, which can be viewed as any dtype."""
    longest = max(bucket.end - bucket.begin for bucket in cut)
    return -(-longest // ALIGN_BYTES) * ALIGN_BYTES


def moved(layout: ParameterLayout, begin: int) -> ParameterLayout:
    """The parameter as it lies in memory that begins at byte `begin` of its own."""
    offset = begin // DTYPE_BYTES[layout.dtype]
    boxes = tuple(replace(box, offset=box.offset - offset) for box in layout.boxes)
    return replace(layout, boxes=boxes)


def check(memory: Memory) -> None:
    """ValueError unless all boxes lie in a weight buffer of this size and dtype."""
    dtype, num_bytes = memory.dtype, memory.num_elements * memory.dtype.itemsize
    is_mixed = dtype == torch.uint8
    if is_mixed and num_bytes % ALIGN_BYTES:
        raise ValueError(f"bytes must be a multiple of {ALIGN_BYTES}, got {num_bytes}")
    for name, layout in memory.parameters.items():
        if not is_mixed and layout.dtype != str(dtype).removeprefix("torch."):
            raise ValueError(
                f"dtype of {name} must be the weight buffer's {dtype}, got {layout.dtype}"
            )
        for box in layout.boxes:
            if box.buffer != BUFFER:
                raise ValueError(f"buffer of {name} must be {BUFFER!r}, got {box.buffer!r}")
            begin, end = _box_extent(box)
            item = DTYPE_BYTES[layout.dtype]
            is_negative = begin < 0 or min(box.strides, default=0) < 0
            if end and (is_negative or end * item > num_bytes):
                raise ValueError(
                    f"{name} must lie within the weight buffer's {num_bytes // item} elements, "
                    f"got elements {begin} to {end - 1}"
                )


def _box_extent(box: Box) -> tuple[int, int]:
    """First element and the one behind the last; (0, 0) for an empty box."""
    if 0 in box.shape:
        return 0, 0
    return box.offset, box.offset_of(tuple(stop - 1 for stop in box.stop)) + 1


def _extent(layout: ParameterLayout) -> tuple[int, int]:
    """First byte and the one behind the last; (0, 0) without elements."""
    item = DTYPE_BYTES[layout.dtype]
    found = [extent for extent in map(_box_extent, layout.boxes) if extent[1]]
    return (min(a for a, _ in found) * item, max(b for _, b in found) * item) if found else (0, 0)


def _num_bytes(parameters: Mapping[str, ParameterLayout], names: list[str]) -> int:
    layouts = (parameters[name] for name in names)
    return sum(math.prod(box.shape) * DTYPE_BYTES[a.dtype] for a in layouts for box in a.boxes)
