"""Fingerprints: 64-bit sums that tell whether the right bits are in the right places.

Owns: the sum, and the walk over a box in small tiles. Does not own: who compares (`publish.py`).
Invariant: sums over disjoint boxes of a parameter add up, modulo 2^64, to the sum over their
union, whatever the layout.

    fingerprint(name) = sum over elements e of  key(name) * key(row(e)) * key(column(e)) * bits(e)

`column` is the global index along the last dimension, `row` the flat global index over all others,
`bits` the element's bit pattern after casting. Keys are odd pseudo-random 64-bit numbers, so one
changed bit always changes the sum, and swapped, misplaced or skipped elements do but for a chance
below 2^-31. The product form makes it one integer matrix-vector product per tile.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TILE_ELEMENTS = 8192  # 64 KiB of int64: stays in the cache and far below any real parameter
MODULUS = 1 << 64
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_ROW_SALT, _COLUMN_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344  # digits of pi

Tile = tuple[tuple[int | slice, ...], int, int]
"""Index of a tile of at most two dimensions in its box, its global row and its global column."""


def fingerprint(name: str, box: Tensor, start: Sequence[int], shape: Sequence[int]) -> int:
    """Partial fingerprint of parameter `name` of global `shape`, over one `box` of it.

    `box` is a view of any strides whose first element has global index `start`.
    """
    total = 0
    for index, row, column in tiles(start, tuple(box.shape), shape):
        total += tile_sum(box[index], row, column)
    return finish(name, total)


def finish(name: str, total: int) -> int:
    """Turn a sum of `tile_sum` into a fingerprint of `name`, in 0 .. 2^64 - 1."""
    return total * _name_key(name) % MODULUS


def tile_sum(tile: Tensor, row: int, column: int) -> int:
    """Keyed sum over one tile of shape [], [C] or [R, C], before the key of the name."""
    bits = tile.view(_BITS[tile.element_size()])
    wide = bits.to(torch.int64).reshape(-1, tile.shape[-1] if tile.ndim else 1)
    rows = torch.mv(wide, _keys(_COLUMN_SALT, column, wide.shape[1]))
    return int(torch.dot(rows, _keys(_ROW_SALT, row, wide.shape[0])))


def tiles(start: Sequence[int], extents: Sequence[int], shape: Sequence[int]) -> Iterator[Tile]:
    """Cut the box at global `start` into tiles of at most TILE_ELEMENTS, in memory order."""
    if not extents:
        yield (), 0, 0
        return
    if 0 in extents:
        return
    num_columns = min(extents[-1], TILE_ELEMENTS)
    if len(extents) == 1:
        for column in range(0, extents[0], num_columns):
            yield (slice(column, column + num_columns),), 0, start[0] + column
        return
    num_rows = TILE_ELEMENTS // num_columns
    for outer in _indices(extents[:-2]):
        base = start[-2]
        for dim, index in enumerate(outer):
            base += (start[dim] + index) * math.prod(shape[dim + 1 : -1])
        for row in range(0, extents[-2], num_rows):
            for column in range(0, extents[-1], num_columns):
                rows, columns = slice(row, row + num_rows), slice(column, column + num_columns)
                yield (*outer, rows, columns), base + row, start[-1] + column


def _indices(extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for flat in range(math.prod(extents)):
        index = []
        for extent in reversed(extents):
            flat, last = divmod(flat, extent)
            index.append(last)
        yield tuple(reversed(index))


@functools.cache
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _keys(salt: int, start: int, count: int) -> Tensor:
    """Keys of indices start .. start + count - 1, int64 [count]; usually a view of the cache."""
    first, last = start // TILE_ELEMENTS, (start + count - 1) // TILE_ELEMENTS
    blocks = [_key_block(salt, block) for block in range(first, last + 1)]
    keys = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    begin = start - first * TILE_ELEMENTS
    return keys[begin : begin + count]


@functools.lru_cache(maxsize=64)
def _key_block(salt: int, block: int) -> Tensor:
    """Odd keys of one block of indices: splitmix64 of salt + index."""
    index = torch.arange(block * TILE_ELEMENTS, (block + 1) * TILE_ELEMENTS, dtype=torch.int64)
    mixed = index * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shift_right(mixed, shift)) * _signed(factor)
    return (mixed ^ _shift_right(mixed, 31)) | 1


def _shift_right(values: Tensor, shift: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as this unsigned number."""
    return value - MODULUS if value >= MODULUS // 2 else value
