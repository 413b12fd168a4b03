"""What casting, summing and copying a box of a parameter takes: calls of torch and bytes.

Owns: these counts, as `publish/fingerprint.py` makes them. Does not own: seconds
(`publish_rates.py`) or which boxes there are. Invariant: a count is that of the walk itself, tile
by tile, once its keys are kept from an earlier publish; a test counts the real calls beside it.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from llamarl.core.device.devices import platform_of
from llamarl.core.device.names import CPU
from llamarl.publish.fingerprint import (
    FEWEST_ROWS,
    MATRIX_BLOCK,
    NUM_KEYS,
    SIDE_ELEMENTS,
    segment_elements,
)
from llamarl.publish.reshard import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Effort:
    """`num_calls` of torch, of which `num_launches` start work on a device, and `num_answers` wait
    for it. Bytes: `moved` between memory and the processor by copies, `cached` the same within its
    cache, `summed` in the cache after a copy, `read` from memory to be summed, `host` from or to
    host memory by a GPU."""

    num_calls: int = 0
    num_launches: int = 0
    num_answers: int = 0
    moved_bytes: int = 0
    cached_bytes: int = 0
    summed_bytes: int = 0
    read_bytes: int = 0
    host_bytes: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, self._numbers, other._numbers))

    def times(self, count: int) -> Self:
        """So often."""
        return type(self)(*(count * number for number in self._numbers))

    @property
    def _numbers(self) -> tuple[int, ...]:
        """In the order of the fields."""
        bytes_ = (self.moved_bytes, self.cached_bytes, self.summed_bytes, self.read_bytes)
        return self.num_calls, self.num_launches, self.num_answers, *bytes_, self.host_bytes


def views(count: int) -> Effort:
    """Calls that start no work."""
    return Effort(num_calls=count)


def kernels(count: int) -> Effort:
    """Calls that do."""
    return Effort(num_calls=count, num_launches=count)


ANSWER = Effort(num_calls=1, num_launches=1, num_answers=1)
PLACED = views(4)
"""Before a piece is copied: its part of a message, as numbers, in its shape, and its source's."""
UNPLACED = Effort(num_calls=5, num_launches=1)
"""A piece at the target: the same, and the copy to its place, whose bytes count apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A box of `shape` whose columns begin at `start` (the global index of its first element) in a
    parameter of `global_shape`, in memory with `strides`, summed along the dimension `dim` after
    casting from `source_dtype` to `dtype`. `is_copied`: into other memory, else only summed."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    global_shape: tuple[int, ...]
    strides: tuple[int, ...]
    source_dtype: str
    dtype: str
    dim: int
    is_copied: bool


def walked(walk: Walk, device: str) -> Effort:
    """One call of `transfer` or `fingerprint` on this kind of device."""
    if not math.prod(walk.shape):
        return Effort()
    sides = 1 + walk.is_copied
    missing = max(0, 2 - len(walk.shape))
    wide = (1,) * missing
    shape, global_shape = wide + walk.shape, wide + walk.global_shape
    start = (0,) * missing + walk.start
    # torch gives a new first dimension the stride that follows.
    strides = (*(math.prod(walk.shape) for _ in range(missing)), *walk.strides)
    total = views(missing * sides)
    if walk.dim == -2:
        total += views(sides)
        shape, start, global_shape, strides = map(_turned, (shape, start, global_shape, strides))
    num_planes = math.prod(shape[:-2])
    is_packed = walk.source_dtype != walk.dtype or strides[-1] != 1
    platform = platform_of(device)
    plane = _Plane(
        num_rows=shape[-2],
        width=shape[-1],
        row_stride=strides[-2],
        stride=strides[-1],
        column=start[-1],
        num_columns=global_shape[-1],
        source_itemsize=DTYPE_BYTES[walk.source_dtype],
        itemsize=DTYPE_BYTES[walk.dtype],
        is_packed=is_packed,
        is_copied=walk.is_copied,
        is_cpu=device == CPU,
        tile_bytes=platform.tile_bytes if walk.is_copied or is_packed else platform.summed_bytes,
        max_sums=platform.max_sums,
    )
    one, num_blocks = _plane(plane)
    total += (views((len(shape) - 2) * sides) + one).times(num_planes)
    if num_planes * num_blocks > 1:
        total += kernels(2)
    return total + ANSWER


def _turned(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """With the last two exchanged."""
    return (*numbers[:-2], numbers[-1], numbers[-2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """One matrix of a box, as its target wants it summed: row after row."""

    num_rows: int
    width: int
    row_stride: int
    stride: int
    column: int
    num_columns: int
    source_itemsize: int
    itemsize: int
    is_packed: bool
    is_copied: bool
    is_cpu: bool
    tile_bytes: int
    max_sums: int

    @property
    def is_turned(self) -> bool:
        """Whether tiles are transposed in the cache."""
        is_crossed = self.is_packed and self.num_rows > 1 and self.row_stride < self.stride
        return is_crossed and self.is_cpu


@lru_cache(maxsize=1 << 14)
def _plane(plane: _Plane) -> tuple[Effort, int]:
    """(what a plane takes, in how many blocks)."""
    total, num_blocks = Effort(), 0
    most = SIDE_ELEMENTS if plane.is_turned else max(1, plane.tile_bytes // plane.itemsize)
    for strips, is_joined in _strips(plane, most):
        width = sum(strips)
        height = max(1, plane.tile_bytes // (width * plane.itemsize))
        height = min(plane.num_rows, height, max(1, plane.max_sums // len(strips)))
        step = height * max(1, plane.max_sums // (len(strips) * height))
        total += views(plane.is_packed)
        num_whole, rest = divmod(plane.num_rows, step)
        num_blocks += num_whole + (rest > 0)
        for num_rows, count in ((step, num_whole), (rest, 1)):
            if num_rows and count:
                block = _block(plane, strips, is_joined, num_rows, height)
                total += block.times(count)
    return total, num_blocks


def _strips(plane: _Plane, most: int) -> Iterator[tuple[list[int], bool]]:
    """The widths of strips that are walked together, and whether one product sums their rows."""
    segment = segment_elements(plane.num_columns, plane.itemsize)
    gap = 0 if plane.is_packed or plane.num_rows == 1 else plane.row_stride
    strips: list[int] = []
    left, is_whole = 0, True
    while left < plane.width:
        place = (plane.column + left) % segment
        count = min(segment - place, plane.width - left, most)
        if strips and sum(strips) + count > most:
            yield strips, is_whole and gap in (0, sum(strips))
            strips, is_whole = [], True
        strips.append(count)
        is_whole = is_whole and (count, place) == (segment, 0)
        left += count
    yield strips, is_whole and gap in (0, sum(strips))


def _block(
    plane: _Plane, strips: Sequence[int], is_joined: bool, num_rows: int, height: int
) -> Effort:
    """Rows whose sums are multiplied together, in tiles of `height` rows."""
    sides, width = 1 + plane.is_copied, sum(strips)
    is_cut = (num_rows < plane.num_rows) + (width < plane.width)
    parts = [width // len(strips)] if is_joined else list(strips)
    num_tiles = -(-num_rows // height)
    total = views(is_cut * sides + 2 + (num_tiles > 1) * (sides + len(parts) * NUM_KEYS))
    if not plane.is_packed:
        total += _lined(parts, num_tiles > 1, plane.width if is_cut else width)
    num_whole, rest = divmod(num_rows, height)
    for rows, count in ((height, num_whole), (rest, 1)):
        if rows and count:
            total += _tile(plane, parts, is_joined, rows, len(strips), width).times(count)
    elements = num_rows * width
    out_bytes = elements * plane.itemsize
    if plane.is_packed:
        # Cast into a tile, which stays in the cache, and from there to the target.
        times = 3 if plane.is_turned else 1
        total += Effort(
            moved_bytes=elements * plane.source_itemsize, cached_bytes=times * out_bytes
        )
        if plane.is_copied:
            total += Effort(moved_bytes=out_bytes, cached_bytes=out_bytes)
        total += Effort(summed_bytes=out_bytes)
    elif plane.is_copied:
        total += Effort(moved_bytes=2 * out_bytes, summed_bytes=out_bytes)
    else:
        total += Effort(read_bytes=out_bytes)
    return total + kernels(2)


def _tile(
    plane: _Plane,
    parts: Sequence[int],
    is_joined: bool,
    rows: int,
    num_strips: int,
    width: int,
) -> Effort:
    """One tile: cast, copied, and its bytes summed part by part."""
    total = Effort()
    if plane.is_packed:
        total += views(2) + kernels(1)
        if plane.is_turned:
            total += views(3) + kernels(1)
        total += _lined(parts, False, width)
    total += kernels(int(plane.is_copied))
    lines = rows * num_strips if is_joined else rows
    for part in parts:
        part_bytes = part * plane.itemsize
        if plane.is_cpu:
            total += kernels(NUM_KEYS)
        else:
            pitch = width if plane.is_packed else plane.row_stride
            is_gapped = not is_joined and part != pitch and lines > 1
            has_more_rows = lines < FEWEST_ROWS or lines % MATRIX_BLOCK > 0
            is_moved = is_gapped or has_more_rows or part_bytes % MATRIX_BLOCK > 0
            total += kernels(1 + is_moved + NUM_KEYS) + views(NUM_KEYS * (1 + has_more_rows))
    return total


def _lined(parts: Sequence[int], is_split: bool, width: int) -> Effort:
    """The bytes of a tile or of all tiles as lines of each part; seen as bytes takes two calls."""
    each = 1 if len(parts) == 1 else len([part for part in parts if part < width])
    return views(2 + each + is_split * len(parts))
