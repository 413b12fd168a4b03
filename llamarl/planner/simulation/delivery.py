"""One version on its way from a source to one replica: what each rank does for it.

Owns: pieces, messages and efforts of every rank, from real copies and layouts, in seconds of its
own device. Does not own: which copies there are (`publish/reshard.py`), what a piece takes
(`effort.py`), the ways between devices (`publish.py`) or what goes on at once (`stages.py`).
Invariant: needs nothing but layouts and rates, so each copy counts in its own dtype.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llamarl.core.device.devices import platform_of
from llamarl.core.device.names import CPU
from llamarl.planner.simulation.effort import (
    ANSWER,
    PLACED,
    UNPLACED,
    Effort,
    Walk,
    kernels,
    views,
    walked,
)
from llamarl.planner.simulation.publish_rates import PublishRates
from llamarl.publish.fingerprint import line_dim
from llamarl.publish.layout import (
    MESSAGE_BYTES,
    ROWS_SCALE,
    TENSOR_SCALE,
    Copy,
    ParameterLayout,
    RankLayout,
    base_of,
)
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.transports.mapped import PIECE_BYTES
from llamarl.publish.transports.messages import ALIGN_BYTES, cut
from llamarl.publish.transports.routes import TRANSPORTS

QUANTISING_VIEWS, QUANTISING_KERNELS = 4, 8
"""Of a tile: both ends' places, its scales; rounded, widened, scaled, cut, rounded, stored."""
QUANTISING_BYTES = 40
"""That one element moves within the cache meanwhile."""
Floats = NDArray[np.float64]
NUM_BUFFERS = 2
"""Messages that a source has new memory for in each publish; a target keeps its own."""


@dataclass(frozen=True, kw_only=True)
class SideRates:
    """The ranks of one side: the kind of their `device`, what each reaches, and whether versions
    wait there in host memory (`is_host`: of a GPU)."""

    device: str
    rates: PublishRates
    is_host: bool = False


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """`num_bytes` and `num_messages` from each source rank (row) to each target rank (column); no
    messages if memory is mapped. Seconds by rank: `packing_s` (casting, summing, copying) at the
    source, `unpacking_s` and `verify_s` at the target."""

    num_bytes: NDArray[np.int64]
    num_messages: Floats
    packing_s: Floats
    unpacking_s: Floats
    verify_s: Floats

    def late(self, message_bytes: int = MESSAGE_BYTES) -> float:
        """How much later than the first the last target begins to receive, as a share of the time
        that receiving takes: all sources begin with the same target and go on in turns."""
        num_turns = int((self.num_bytes > 0).sum(1).max()) - 1
        longest = min(message_bytes, int(self.num_bytes.max()))
        return num_turns * longest / max(1, int(self.num_bytes.sum(0).max()))


def delivery(
    copies: Iterable[tuple[Copy, int]],
    source: Sequence[tuple[RankLayout, int]],
    target: Sequence[tuple[RankLayout, int]],
    *,
    ends: tuple[SideRates, SideRates],
    transport: str,
    message_bytes: int = MESSAGE_BYTES,
) -> Delivery:
    """`copies` with how many layers have each, parts of both sides' layouts likewise."""
    is_mapped = TRANSPORTS[transport].is_mapped
    here, there = ends
    held = {(each.rank, name): p for each, _ in source for name, p in each.parameters.items()}
    size = tuple(1 + max(layout.rank for layout, _ in side) for side in (source, target))
    num_bytes, num_messages = np.zeros(size, np.int64), np.zeros(size)
    packing_s, unpacking_s, verify_s = np.zeros(size[0]), np.zeros(size[1]), np.zeros(size[1])
    for copy, times in copies:
        parameter, is_made = _held(held, copy)
        piece_bytes = PIECE_BYTES if is_mapped else message_bytes
        walk = Walk(
            shape=copy.shape,
            start=_columns(copy.start),
            global_shape=parameter.shape,
            strides=copy.source_strides,
            source_dtype=copy.target_dtype if is_made else parameter.dtype,
            dtype=copy.target_dtype,
            dim=line_dim(parameter.shape, copy.target_strides),
            is_copied=True,
        )
        pieces = _pieces(copy.shape, max(1, piece_bytes // DTYPE_BYTES[copy.target_dtype]))
        place = copy.source_rank, copy.target_rank
        num_bytes[place] += times * math.prod(copy.shape) * DTYPE_BYTES[copy.target_dtype]
        packing_s[copy.source_rank] += times * _written_s(walk, pieces, here)
        if is_made:
            packing_s[copy.source_rank] += times * _quantised_s(copy.shape, parameter.dtype, here)
        if not is_mapped:
            num_messages[place] += times * _share_of_messages(walk.dtype, pieces, message_bytes)
            unpacking_s[copy.target_rank] += times * _unpacked_s(walk.dtype, pieces, there)
    for layout, times in target:
        verify_s[layout.rank] += times * _verified_s(layout, there)
    longest = np.minimum(num_bytes, 0 if is_mapped else message_bytes)
    num_buffers = np.minimum(num_messages.sum(1), NUM_BUFFERS)
    packing_s += num_buffers * longest.max(1) / here.rates.touched_bytes_per_s
    return Delivery(
        num_bytes=num_bytes,
        num_messages=np.ceil(num_messages - 1e-9),
        packing_s=packing_s,
        unpacking_s=unpacking_s,
        verify_s=verify_s,
    )


def maxima_s(layouts: Iterable[tuple[RankLayout, int]], end: SideRates) -> float:
    """One reading of a rank's shards, for the largest number of each channel: of the rank that
    takes longest."""
    found: dict[int, float] = {}
    for layout, times in layouts:
        efforts = [
            kernels(2) + Effort(read_bytes=math.prod(box.shape) * DTYPE_BYTES[each.dtype])
            for each in layout.parameters.values()
            if len(each.shape) > 1
            for box in each.boxes
        ]
        seconds = times * sum(map(end.rates.seconds, efforts))
        found[layout.rank] = found.get(layout.rank, 0.0) + seconds
    return max(found.values(), default=0.0)


def commit_s(
    layouts: Iterable[tuple[RankLayout, int]], end: SideRates, *, is_staged: bool, is_swapped: bool
) -> float:
    """Until the last rank decodes with what it was sent: each parameter is copied into the engine's
    own (`is_staged`), or all memory at once, unless it `is_swapped`."""
    if is_swapped and not is_staged:
        return 0.0
    found: dict[int, Effort] = {}
    for layout, times in layouts:
        numbers = [
            math.prod(box.shape) * DTYPE_BYTES[each.dtype]
            for each in layout.parameters.values()
            for box in each.boxes
        ]
        made = _copied(sum(numbers), end) + kernels(len(numbers) if is_staged else 0)
        found[layout.rank] = found.get(layout.rank, kernels(1)) + made.times(times)
    return max(map(end.rates.seconds, found.values()), default=0.0)


def relay_s(layouts: Iterable[tuple[RankLayout, int]], end: SideRates, num_siblings: int) -> float:
    """Until the busiest rank of a replica has written all that it holds to each of so many like
    it."""
    found: dict[int, float] = {}
    for layout, times in layouts:
        seconds = num_siblings * times * _passed_s(layout, end)
        found[layout.rank] = found.get(layout.rank, 0.0) + seconds
    return max(found.values(), default=0.0)


def _columns(start: tuple[int, ...]) -> tuple[int, ...]:
    """Where a box begins, as far as its walk depends on it."""
    return (*(0 for _ in start[:-2]), *start[-2:])


@lru_cache(maxsize=1 << 14)
def _pieces(shape: tuple[int, ...], max_elements: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(shape, how many) of the pieces that a copy of this shape is cut into, in order."""
    zeros = (0,) * len(shape)
    whole = Copy("", zeros, shape, 0, "", 0, zeros, 0, 0, zeros, "")
    found: dict[tuple[int, ...], int] = {}
    for piece in cut(whole, max_elements):
        found[piece.shape] = found.get(piece.shape, 0) + 1
    return tuple(found.items())


Pieces = tuple[tuple[tuple[int, ...], int], ...]


@lru_cache(maxsize=1 << 14)
def _written_s(walk: Walk, pieces: Pieces, end: SideRates) -> float:
    """All pieces of one copy at its source."""
    total_s = 0.0
    for shape, count in pieces:
        piece = Walk(
            shape=shape,
            start=walk.start,
            global_shape=walk.global_shape,
            strides=walk.strides,
            source_dtype=walk.source_dtype,
            dtype=walk.dtype,
            dim=walk.dim,
            is_copied=True,
        )
        total_s += count * end.rates.seconds(PLACED + walked(piece, end.device))
    return total_s


@lru_cache(maxsize=1 << 14)
def _unpacked_s(dtype: str, pieces: Pieces, end: SideRates) -> float:
    """All pieces of one copy at its target."""
    return sum(
        count * end.rates.seconds(UNPLACED + _copied(math.prod(shape) * DTYPE_BYTES[dtype], end))
        for shape, count in pieces
    )


def _held(
    held: Mapping[tuple[int, str], ParameterLayout], copy: Copy
) -> tuple[ParameterLayout, bool]:
    """(what a source rank makes a copy of, whether it quantises it: else it has it as it is)."""
    found = held.get((copy.source_rank, copy.name))
    if found is None and copy.name.endswith((ROWS_SCALE, TENSOR_SCALE)):
        end = tuple(a + b for a, b in zip(copy.start, copy.shape, strict=True))
        return ParameterLayout(shape=end, dtype=copy.target_dtype, boxes=()), False
    if found is None:
        return held[copy.source_rank, base_of(copy.name)], True
    return found, False


@lru_cache(maxsize=1 << 14)
def _quantised_s(shape: tuple[int, ...], dtype: str, end: SideRates) -> float:
    """The values of one copy from a matrix of `dtype`, a tile at a time."""
    num_elements = math.prod(shape)
    num_tiles = sum(n for _, n in _pieces(shape, platform_of(end.device).num_tiled))
    cached = QUANTISING_BYTES * num_elements
    calls = views(QUANTISING_VIEWS) + kernels(QUANTISING_KERNELS)
    read = Effort(moved_bytes=DTYPE_BYTES[dtype] * num_elements, cached_bytes=cached)
    return end.rates.seconds(calls.times(num_tiles) + read)


def _share_of_messages(dtype: str, pieces: Pieces, message_bytes: int) -> float:
    """Messages that hold nothing but copies like this, one after the other: none of the pieces that
    a copy is cut into has room for the next one."""
    num_pieces = sum(count for _, count in pieces)
    piece_bytes = math.prod(pieces[0][0]) * DTYPE_BYTES[dtype] if pieces else 0
    if num_pieces != 1 or not piece_bytes:
        return num_pieces
    aligned_bytes = -(-piece_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return 1 / max(1, (message_bytes - piece_bytes) // aligned_bytes + 1)


def _copied(num_bytes: int, end: SideRates) -> Effort:
    """To or from where versions wait: in memory, or over the way to the host."""
    if end.is_host and end.device != CPU:
        return Effort(host_bytes=num_bytes)
    return Effort(moved_bytes=2 * num_bytes)


def _verified_s(layout: RankLayout, end: SideRates) -> float:
    """The sums of all boxes where they wait."""
    return sum(end.rates.seconds(each) for each in _boxes(layout, end, is_copied=False))


def _passed_s(layout: RankLayout, end: SideRates) -> float:
    """All boxes written to one replica like this one."""
    return sum(end.rates.seconds(each) for each in _boxes(layout, end, is_copied=True))


def _boxes(layout: RankLayout, end: SideRates, *, is_copied: bool) -> list[Effort]:
    found = []
    for parameter in layout.parameters.values():
        for box in parameter.boxes:
            walk = Walk(
                shape=box.shape,
                start=_columns(box.start),
                global_shape=parameter.shape,
                strides=box.strides,
                source_dtype=parameter.dtype,
                dtype=parameter.dtype,
                dim=line_dim(parameter.shape, box.strides),
                is_copied=is_copied,
            )
            effort = views(2) + walked(walk, end.device)
            if end.is_host and end.device != CPU:
                num_bytes = math.prod(box.shape) * DTYPE_BYTES[parameter.dtype]
                effort += Effort(host_bytes=num_bytes) + ANSWER
            found.append(effort)
    return found
