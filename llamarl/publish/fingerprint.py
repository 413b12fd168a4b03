"""Fingerprints: 64-bit sums that show whether the right bits are in the right places."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llamarl.core.device.devices import platform_of
from llamarl.publish.comparison import MODULUS, Fingerprints
from llamarl.publish.layout import Box, Format, Kind, ParameterLayout
from llamarl.publish.shards import ShardScales, as_dtensor, cut_rows, quantize, shard_boxes

NUM_KEYS = 2  # independent sets of keys
SEGMENT_BYTES = 3 << 10  # longest row; longer ones share lines of the cache
_MATRIX_COLUMNS = 8
MATRIX_BLOCK = 16  # cuBLASLt multiplies int8 by whole blocks of rows and of bytes
FEWEST_ROWS = 32  # which torch wants to be above 16
_EXACT_BYTES = 1 << 10  # products of so many signed bytes add up exactly in float32
_int_mm = torch._int_mm


@functools.lru_cache(maxsize=256)
def byte_keys(place: int, num_bytes: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the keys of these bytes of a segment in the form of `add_bytes`. On CPUs it is an int8
    [num_bytes, 1] for each set, or float32 where int8 products round; on other devices one matrix
    with all sets side by side, and columns of zeros."""
    columns = tuple(_column_keys(number)[place : place + num_bytes] for number in range(NUM_KEYS))
    if device.type == "cpu":
        return columns if _is_exact() else tuple(column.to(torch.float32) for column in columns)
    return (side_by_side(columns).to(device),)


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Return sets of keys as one matrix, with the keys of a set next to each other in memory: the
    order that cuBLASLt's int8 products take everywhere, and fastest."""
    matrix = torch.cat([*columns], dim=1)
    added = (0, _MATRIX_COLUMNS - len(columns), 0, -len(matrix) % MATRIX_BLOCK)
    return functional.pad(matrix, added).t().contiguous().t()


def add_bytes(values: Tensor, outs: Sequence[Tensor], keys: tuple[Tensor, ...]) -> None:
    """Fill `outs`, an int32 [R, 1] for each set of keys, with the keyed sums of `values` (int8 [R,
    C]); `keys` are the keys of its bytes."""
    if keys[0].dtype == torch.int8 and len(keys) == NUM_KEYS:
        for column, out in zip(keys, outs, strict=True):
            _int_mm(values, column, out=out)
        return
    if len(keys) == NUM_KEYS:
        wide = values.to(torch.float32).split(_EXACT_BYTES, dim=1)
        for column, out in zip(keys, outs, strict=True):
            out.zero_()
            for part, part_keys in zip(wide, column.split(_EXACT_BYTES), strict=True):
                out += (part @ part_keys).to(torch.int32)
        return
    (matrix,) = keys
    num_rows, num_bytes = values.shape
    num_added = max(FEWEST_ROWS - num_rows, -num_rows % MATRIX_BLOCK)
    added = (0, len(matrix) - num_bytes, 0, num_added)
    padded = functional.pad(values, added) if any(added) else values.contiguous()
    try:
        sums = _int_mm(padded, matrix)
    except RuntimeError:  # which shapes cuBLASLt refuses differs between kinds of card
        sums = padded.to(torch.float64) @ matrix.to(torch.float64)
    for number, out in enumerate(outs):
        out.copy_(sums[:num_rows, number : number + 1])


@functools.cache
def _column_keys(number: int) -> Tensor:
    """Return the keys of one set, int8 [SEGMENT_BYTES, 1]: the bytes of a hash that are not 0."""
    digest = hashlib.shake_256(f"keys of bytes, set {number}".encode()).digest(2 * SEGMENT_BYTES)
    keys = torch.tensor([byte for byte in digest if byte][:SEGMENT_BYTES], dtype=torch.uint8)
    return keys.view(torch.int8).unsqueeze(1)


@functools.cache
def _key_sums(number: int) -> list[int]:
    """Return a list with the sum of the first i keys at i."""
    return [0, *_column_keys(number).flatten().to(torch.int64).cumsum(0).tolist()]


@functools.cache
def _is_exact() -> bool:
    """Return whether this processor's int8 product is exact, which is tried with the largest
    numbers."""
    values = torch.full((4, SEGMENT_BYTES), -128, dtype=torch.int8)
    values[1], values[2, ::2], values[3] = 127, 127, -1
    keys = torch.full((SEGMENT_BYTES, 1), -128, dtype=torch.int8)
    keys[::3] = 127
    expected = values.to(torch.int64) @ keys.to(torch.int64)
    return torch.equal(_int_mm(values, keys).to(torch.int64), expected)


SIDE_ELEMENTS = 128  # width of a tile that is transposed: lines of both stay in the cache
KEY_BLOCK = 1 << 13
_ROW_SALT, _SEGMENT_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344  # digits of pi


class _Strip(NamedTuple):
    """Columns of a plane within one segment: `width` columns from `left` on; `place` is the column
    of the segment where they begin."""

    left: int
    width: int
    segment: int
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The walk over columns [left, right) of a plane: in tiles of `height` rows, whose sums are
    multiplied by their keys after each `step` rows.

    If `is_joined`, the rows of all strips lie one after the other as `num_lines` lines of a row, so
    that one product sums them; else each strip is a part of its own. For each part, `bounds` has
    its first byte and its number of bytes in a row, and `keys` the keys of these."""

    left: int
    right: int
    height: int
    step: int
    strips: tuple[_Strip, ...]
    is_joined: bool
    num_lines: int
    bounds: list[tuple[int, int]]
    keys: list[tuple[Tensor, ...]]
    itemsize: int


def line_dim(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the dimension along which a parameter of this global shape is summed, if the target
    keeps it with these strides: -1, or -2 where that one is closer in memory."""
    if len(shape) < 2:
        return -1
    return -2 if shape[-1] == 1 or strides[-2] < strides[-1] else -1


def fingerprint(
    name: str, box: Tensor, start: Sequence[int], shape: Sequence[int], dim: int
) -> int:
    """Return the partial fingerprint of parameter `name` of global `shape`, over one `box` of it.

    `box` is a view of any strides whose first element has global index `start`; `dim` is the
    target's `line_dim`."""
    return transfer(name, box, None, start, shape, dim)


@functools.cache
def segment_elements(num_columns: int, itemsize: int) -> int:
    """Return the number of elements of a segment of rows of this length; if possible all segments
    are equally long."""
    num_segments = -(-num_columns * itemsize // SEGMENT_BYTES)
    for count in range(num_segments, 4 * num_segments + 1):
        if num_columns % count == 0:
            return num_columns // count
    return SEGMENT_BYTES // itemsize


def transfer(
    name: str,
    source: Tensor,
    target: Tensor | None,
    start: Sequence[int],
    shape: Sequence[int],
    dim: int,
) -> int:
    """Copy `source` into `target` [same shape], if there is one, cast to its dtype, tile by tile.

    Returns the fingerprint of the cast values: of what should be written, not of what `target`
    holds afterwards. Strides and devices may be any."""
    if source.numel() == 0:
        return 0
    missing = max(0, 2 - source.ndim)
    start, shape = (0,) * missing + tuple(start), (1,) * missing + tuple(shape)
    for _ in range(missing):
        source, target = source.unsqueeze(0), None if target is None else target.unsqueeze(0)
    if dim == -2:
        source, target = source.mT, None if target is None else target.mT
        start, shape = (*start[:-2], start[-1], start[-2]), (*shape[:-2], shape[-1], shape[-2])
    total, sums = 0, []
    for outer in itertools.product(*map(range, source.shape[:-2])):
        row = start[-2]
        for axis, index in enumerate(outer):
            row += (start[axis] + index) * math.prod(shape[axis + 1 : -1])
        plane = target[outer] if outer and target is not None else target
        source_plane = source[outer] if outer else source
        for constant, part in _plane_sums(source_plane, plane, row, start[-1], shape[-1]):
            total += constant
            sums.append(part)
    total += int(sums[0] if len(sums) == 1 else torch.stack(sums).sum())
    return total * _name_key(name) % MODULUS


def _plane_sums(
    source: Tensor, target: Tensor | None, row: int, column: int, num_columns: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield, for parts of `source` [R, C], the sum over the 129s and the sum over the bytes, an
    int64 [], before the key of the name.

    A publish of a small model is mostly calls of torch, each of which waits for the thread that
    decodes: a plane of one tile makes as few of them as possible."""
    dtype, device = (source if target is None else target).dtype, source.device
    (num_rows, width), (row_stride, stride) = source.shape, source.stride()
    is_packed = source.dtype != dtype or stride != 1
    is_crossed = is_packed and num_rows > 1 and row_stride < stride
    platform, is_summed = platform_of(device), target is None and not is_packed
    most = platform.summed_bytes if is_summed else platform.tile_bytes
    gap = 0 if is_packed or num_rows == 1 else row_stride
    cuts = _cuts(
        num_rows,
        width,
        column,
        num_columns,
        dtype.itemsize,
        gap,
        is_crossed,
        most,
        platform.max_sums,
        device,
    )
    for cut in cuts:
        packed = None
        if is_packed:
            size = cut.height * (cut.right - cut.left)
            packed = torch.empty(size, dtype=dtype, device=device)
        for top in range(0, num_rows, cut.step):
            values, goal = source, target
            if num_rows > cut.step or cut.right - cut.left < width:
                values = source[top : top + cut.step, cut.left : cut.right]
                if target is not None:
                    goal = target[top : top + cut.step, cut.left : cut.right]
            sums = _block_sums(values, goal, packed, cut)
            constant, keys = _block_keys(row + top, min(cut.step, num_rows - top), cut, device)
            yield constant, (sums * keys).sum()


@functools.lru_cache(maxsize=256)  # every publish asks for the same ones
def _cuts(
    num_rows: int,
    width: int,
    column: int,
    num_columns: int,
    itemsize: int,
    gap: int,
    is_crossed: bool,
    tile_bytes: int,
    max_sums: int,
    device: torch.device,
) -> list[_Cut]:
    """Return the cuts of a plane whose rows begin `gap` columns apart; 0: they follow each other in
    each cut."""
    is_turned = is_crossed and device.type == "cpu"
    most = SIDE_ELEMENTS if is_turned else max(1, tile_bytes // itemsize)
    segment = segment_elements(num_columns, itemsize)
    cuts = []
    for strips in _strips(column, width, segment, most):
        left, right = strips[0].left, strips[-1].left + strips[-1].width
        height = max(1, tile_bytes // ((right - left) * itemsize))
        height = min(num_rows, height, max(1, max_sums // len(strips)))
        are_whole = all((strip.width, strip.place) == (segment, 0) for strip in strips)
        is_joined = are_whole and gap in (0, right - left)
        parts = strips[:1] if is_joined else strips
        cuts.append(
            _Cut(
                left=left,
                right=right,
                height=height,
                step=height * max(1, max_sums // (len(strips) * height)),
                strips=strips,
                is_joined=is_joined,
                num_lines=len(strips) if is_joined else 1,
                bounds=[((part.left - left) * itemsize, part.width * itemsize) for part in parts],
                keys=[byte_keys(*_extent(part, itemsize), device) for part in parts],
                itemsize=itemsize,
            )
        )
    return cuts


def _strips(column: int, width: int, segment: int, most: int) -> Iterator[tuple[_Strip, ...]]:
    """Yield the columns from `column` on as groups of strips, each group up to `most` columns
    wide."""
    strips: list[_Strip] = []
    left = 0
    while left < width:
        number, place = divmod(column + left, segment)
        count = min(segment - place, width - left, most)
        if strips and left + count - strips[0].left > most:
            yield tuple(strips)
            strips = []
        strips.append(_Strip(left, count, number, place))
        left += count
    yield tuple(strips)


def _block_sums(source: Tensor, target: Tensor | None, packed: Tensor | None, cut: _Cut) -> Tensor:
    """Return the int32 sums of the bytes of `source` [R, C]: of each row and line [NUM_KEYS, R *
    lines, 1] if the cut is joined, else of each strip and row [strips * NUM_KEYS, R, 1].

    Tiles are copied into `target`, by way of `packed` [height * C] if given, and then summed while
    they are in the cache."""
    num_parts, num_rows = len(cut.bounds), source.shape[0] * cut.num_lines
    size = (num_parts * NUM_KEYS, num_rows, 1)
    sums = torch.empty(size, dtype=torch.int32, device=source.device)
    height = cut.height * cut.num_lines
    outs = [_tiles(each, height) for each in sums.unbind()]
    own = [
        zip(*outs[first : first + NUM_KEYS], strict=True) for first in range(0, len(outs), NUM_KEYS)
    ]
    tiles = _tiles(source, cut.height)
    goals = itertools.repeat(None) if target is None else _tiles(target, cut.height)
    # As weights fill the caches, Python code between two calls costs several times more.
    lines = [] if packed is not None else _lines(source, cut.bounds, height)
    turns = list(zip(map(iter, lines), own, cut.keys, strict=True)) if lines else []
    for values, goal in zip(tiles, goals, strict=False):
        if packed is not None:
            values = _packed(values, packed)
            parts = map(iter, _lines(values, cut.bounds, height))
            turns = list(zip(parts, own, cut.keys, strict=True))
        if goal is not None:
            goal.copy_(values)
        for line, out, keys in turns:
            add_bytes(next(line), next(out), keys)
    return sums


def _lines(
    values: Tensor, bounds: Sequence[tuple[int, int]], num_lines: int
) -> list[tuple[Tensor, ...]]:
    """Return the bytes of `values` [R, C]: for each part (first byte, bytes) the lines of each
    tile."""
    flat = values.view(torch.int8)
    if len(bounds) == 1:
        return [_tiles(flat.view(-1, bounds[0][1]), num_lines)]
    return [_tiles(flat[:, first : first + size], num_lines) for first, size in bounds]


def _tiles(values: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    return (values,) if values.shape[0] <= num_rows else values.split(num_rows)


def _packed(values: Tensor, packed: Tensor) -> Tensor:
    """Return a tile, cast and row after row, in the memory of `packed`."""
    height, width = values.shape
    tile = packed[: height * width].view(height, width)
    if values.stride(0) < values.stride(1) and values.device.type == "cpu":
        # torch transposes blocks in the cache only between dense tensors.
        turned = torch.empty((width, height), dtype=packed.dtype)
        return tile.copy_(turned.copy_(values.t()).t())
    return tile.copy_(values)


@functools.cache
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


@functools.lru_cache(maxsize=128)
def _block_keys(row: int, num_rows: int, cut: _Cut, device: torch.device) -> tuple[int, Tensor]:
    """Return the sum of the 129s of a block, and the products of row and segment keys, int64, in
    the order of the block's sums."""
    strips = cut.strips
    first = min(strip.segment for strip in strips)
    count = max(strip.segment for strip in strips) - first + 1
    among = torch.tensor([strip.segment - first for strip in strips])
    constant, found = 0, []
    for j in range(NUM_KEYS):
        rows = _keys(_ROW_SALT + j, row, num_rows).unsqueeze(1)
        segments = _keys(_SEGMENT_SALT + j, first, count)[among]
        sums, extents = _key_sums(j), [_extent(strip, cut.itemsize) for strip in strips]
        offsets = torch.tensor([sums[first + size] - sums[first] for first, size in extents])
        constant += 129 * int(rows.sum()) * int((segments * offsets).sum())
        found.append(rows * segments)  # [R, strips]
    keys = torch.stack(found)
    if cut.is_joined:
        return constant, keys.view(NUM_KEYS, -1, 1).to(device)
    by_strip = keys.permute(2, 0, 1).reshape(len(strips) * NUM_KEYS, num_rows, 1)
    return constant, by_strip.to(device)


def _extent(strip: _Strip, itemsize: int) -> tuple[int, int]:
    """Return the first byte of a strip in its segment, and its number of bytes."""
    return strip.place * itemsize, strip.width * itemsize


def _keys(salt: int, start: int, count: int) -> Tensor:
    """Return the keys of indices start .. start + count - 1, int64 [count]."""
    first, last = start // KEY_BLOCK, (start + count - 1) // KEY_BLOCK
    blocks = [_key_block(salt, block) for block in range(first, last + 1)]
    begin = start - first * KEY_BLOCK
    return (blocks[0] if first == last else torch.cat(blocks))[begin : begin + count]


@functools.lru_cache(maxsize=64)
def _key_block(salt: int, block: int) -> Tensor:
    """Return the odd keys of one block of indices: splitmix64 of salt + index."""
    mixed = np.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK, dtype=np.uint64)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    keys = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(keys.view(np.int64))


def key_of(kind: Kind) -> str:
    """Return the name of a kind in a rank's layout."""
    return kind if isinstance(kind, str) else kind.key


@torch.no_grad()
def frozen_sums(
    parameters: Mapping[str, ParameterLayout],
    view: Callable[[str, Box], Tensor],
    owns: Callable[[str], bool],
) -> Fingerprints:
    """Return the fingerprints of the boxes that this rank holds of the `parameters` that it `owns`:
    each element has one owner."""
    found = Fingerprints()
    for name, layout in parameters.items():
        for box in layout.boxes if owns(name) else ():
            found.add(name, fingerprint(name, view(name, box), box.start, layout.shape, -1))
    return found


@torch.no_grad()
def shard_sums(
    frozen: Mapping[str, Tensor],
    kinds: Sequence[Kind],
    rank: int,
    num_ranks: int,
    num_copies: int = 1,
) -> dict[str, Fingerprints]:
    """Return, by kind, the fingerprints of this rank's shards of the `frozen` parameters, of which
    the ranks hold `num_copies`. With several ranks all call it, on the thread of their
    collectives."""
    tensors, parameters = shard_boxes(frozen)
    is_counted = rank < num_ranks // num_copies  # copies are the mesh's slowest dimension
    own = {name for name, each in frozen.items() if is_counted and _is_first(each)}
    formats = [kind for kind in kinds if isinstance(kind, Format)]
    device = next(iter(tensors.values())).device
    cut = cut_rows(frozen)
    scales = ShardScales(parameters, formats, device, cut=cut, num_ranks=num_ranks)
    scales.derive(tensors)
    sums: dict[str, Fingerprints] = {}
    for kind in kinds:
        dtype = getattr(torch, kind if isinstance(kind, str) else kind.base_dtype)

        def plain(name: str, box: Box, dtype: torch.dtype = dtype) -> Tensor:
            return tensors[name].to(dtype)

        found = frozen_sums(parameters, plain, own.__contains__)
        for each in scales.made.values():
            if each.format == kind and (boxes := parameters[each.base].boxes):
                values = quantize(tensors[each.base], scales.tensors[each.scales], each.format)
                if each.base in own:
                    _add(found, scales.parameters, each.values, values)
                holds_first = boxes[0].start[1] == 0 and each.base in own
                counts = rank == 0 if each.format.is_per_tensor else holds_first
                if counts and each.scales not in found:
                    _add(found, scales.parameters, each.scales, scales.tensors[each.scales])
        sums[key_of(kind)] = found
    return sums


def _add(
    found: Fingerprints, layouts: Mapping[str, ParameterLayout], name: str, values: Tensor
) -> None:
    layout = layouts[name]
    (box,) = layout.boxes
    found.add(name, fingerprint(name, values, box.start, layout.shape, -1))


def _is_first(parameter: Tensor) -> bool:
    """Return whether this rank is the first that holds its elements of a parameter."""
    if (sharded := as_dtensor(parameter)) is None:
        return True
    coordinates = sharded.device_mesh.get_coordinate()
    assert coordinates is not None
    pairs = zip(sharded.placements, coordinates, strict=True)
    return all(coordinate == 0 for placement, coordinate in pairs if placement.is_replicate())
