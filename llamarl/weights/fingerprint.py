"""Fingerprints: 64-bit sums that tell whether the right bits are in the right places.

Owns: the sum, and the walk over a box in small tiles, alone or while it is copied. Does not own:
who compares (`comparison.py`). Invariant: sums over disjoint boxes of a parameter add up, modulo
2^64, to the sum over their union, whatever the layout.

    fingerprint(name) = sum over elements e of
                        key(name) * key(row(e)) * key(column(e)) * (bits(e) + 1)

`column` is the global index along the last dimension, `row` the flat global index over all others,
`bits` the element's bit pattern after casting, as a signed integer. Keys are odd pseudo-random
64-bit numbers, so one changed bit always changes the sum, and swapped, misplaced or skipped
elements do but for a chance below 2^-31, also where zeros are (hence the 1). The product form makes
it one integer matrix-vector product per tile, along whichever dimension is contiguous in memory.
Modulo 2^32, twice as fast, two changed signs would cancel: whatever odd number 2^31 is multiplied
with, it stays 2^31.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llamarl.weights.comparison import MODULUS

RUN_ELEMENTS = 8192  # longest stretch of the contiguous dimension in a tile
SIDE_ELEMENTS = 128  # the same where one side is transposed: lines of both stay in the cache
TILE_ELEMENTS = 1 << 17  # with its int64 copy it fits a large cache, and is below a parameter
CUDA_TILE_ELEMENTS = 1 << 22  # a kernel launch costs as much as 30 MB of reading
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_ROW_SALT, _COLUMN_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344  # digits of pi


def fingerprint(name: str, box: Tensor, start: Sequence[int], shape: Sequence[int]) -> int:
    """Partial fingerprint of parameter `name` of global `shape`, over one `box` of it.

    `box` is a view of any strides whose first element has global index `start`.
    """
    return _walk(name, box, None, start, shape)


def transfer(
    name: str, source: Tensor, target: Tensor, start: Sequence[int], shape: Sequence[int]
) -> int:
    """Copy `source` into `target` [same shape], cast to its dtype, tile by tile.

    Returns the fingerprint of the values after casting: of what was to be written, not of what
    `target` holds afterwards. Strides and devices are any.
    """
    return _walk(name, source, target, start, shape)


def _walk(
    name: str, source: Tensor, target: Tensor | None, start: Sequence[int], shape: Sequence[int]
) -> int:
    if source.numel() == 0:
        return 0
    missing = max(0, 2 - source.ndim)
    source = source.reshape((1,) * missing + source.shape) if missing else source
    target = target.view(source.shape) if missing and target is not None else target
    start, shape = (0,) * missing + tuple(start), (1,) * missing + tuple(shape)
    total = torch.zeros((), dtype=torch.int64, device=source.device)
    for outer in _indices(source.shape[:-2]):
        row = start[-2]
        for dim, index in enumerate(outer):
            row += (start[dim] + index) * math.prod(shape[dim + 1 : -1])
        plane = None if target is None else target[outer]
        _add_plane(total, source[outer], plane, row, start[-1])
    return int(total) * _name_key(name) % MODULUS


def _add_plane(total: Tensor, source: Tensor, target: Tensor | None, row: int, column: int) -> None:
    """Add the keyed sum over `source` [R, C] to `total`, before the key of the name."""
    slow, fast = (_ROW_SALT, row), (_COLUMN_SALT, column)
    if source.shape[0] > 1 and (source.shape[1] == 1 or source.stride(0) < source.stride(1)):
        source, target = source.t(), None if target is None else target.t()
        slow, fast = fast, slow
    # From here on the last dimension is the one that is contiguous in the source.
    is_crossed = target is not None and target.stride(1) > target.stride(0)
    is_turned = is_crossed and source.device.type == "cpu"
    is_packed = is_turned or (target is not None and target.dtype != source.dtype)
    dtype = target.dtype if target is not None else source.dtype
    num_slow, num_fast = source.shape
    run = min(num_fast, SIDE_ELEMENTS if is_crossed else RUN_ELEMENTS)
    step = min(num_slow, (CUDA_TILE_ELEMENTS if source.is_cuda else TILE_ELEMENTS) // run)
    wide = torch.empty(step * run, dtype=torch.int64, device=source.device)
    packed = torch.empty(step * run if is_packed else 0, dtype=dtype, device=source.device)
    turned = torch.empty(step * run if is_turned else 0, dtype=dtype)
    slow_ones = _key_sum(*slow, num_slow, source.device)
    total += slow_ones * _key_sum(*fast, num_fast, source.device)
    for left in range(0, num_fast, run):
        width = min(run, num_fast - left)
        fast_keys = _keys(fast[0], fast[1] + left, width, source.device)
        for top in range(0, num_slow, step):
            height = min(step, num_slow - top)
            values = source[top : top + height, left : left + width]
            if is_packed:
                values = packed[: height * width].view(height, width).copy_(values)
            bits = (
                wide[: height * width].view(height, width).copy_(values.view(_BITS[dtype.itemsize]))
            )
            slow_keys = _keys(slow[0], slow[1] + top, height, source.device)
            total += _keyed_sum(bits, slow_keys, fast_keys)
            if target is None:
                continue
            place = target[top : top + height, left : left + width]
            if is_turned:  # torch turns blocks in the cache, but only between dense tensors
                across = turned[: height * width].view(width, height).copy_(values.t())
                place.t().copy_(across)
            else:
                place.copy_(values)


def _keyed_sum(bits: Tensor, slow_keys: Tensor, fast_keys: Tensor) -> Tensor:
    """Sum of bits [S, F] * slow_keys [S] * fast_keys [F], int64 []; may overwrite `bits`."""
    if bits.is_cuda:  # which has no integer matrix-vector product
        return bits.mul_(fast_keys).sum(1).mul_(slow_keys).sum()
    return torch.dot(torch.mv(bits, fast_keys), slow_keys)


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


def _keys(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """Keys of indices start .. start + count - 1, int64 [count]; usually a view of the cache."""
    first, last = start // RUN_ELEMENTS, (start + count - 1) // RUN_ELEMENTS
    blocks = [_key_block(salt, block, device) for block in range(first, last + 1)]
    keys = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    begin = start - first * RUN_ELEMENTS
    return keys[begin : begin + count]


@functools.lru_cache(maxsize=4096)  # every publish asks for the same ones
def _key_sum(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """Sum of the keys of indices start .. start + count - 1, int64 []."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(start, start + count, RUN_ELEMENTS):
        total += _keys(salt, first, min(RUN_ELEMENTS, start + count - first), device).sum()
    return total


@functools.lru_cache(maxsize=64)
def _key_block(salt: int, block: int, device: torch.device) -> Tensor:
    """Odd keys of one block of indices: splitmix64 of salt + index."""
    index = torch.arange(block * RUN_ELEMENTS, (block + 1) * RUN_ELEMENTS, dtype=torch.int64)
    mixed = index * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shift_right(mixed, shift)) * _signed(factor)
    return ((mixed ^ _shift_right(mixed, 31)) | 1).to(device)


def _shift_right(values: Tensor, shift: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as this unsigned number."""
    return value - MODULUS if value >= MODULUS // 2 else value
