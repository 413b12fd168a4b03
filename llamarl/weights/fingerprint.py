"""Fingerprints: 32-bit sums that tell whether the right bits are in the right places.

Owns: the sum, and the walk over a box in small tiles, alone or while it is copied. Does not own:
who compares (`comparison.py`). Invariant: sums over disjoint boxes of a parameter add up, modulo
2^32, to the sum over their union, whatever the layout.

    fingerprint(name) = sum over elements e of
                        key(name) * key(row(e)) * key(column(e)) * (bits(e) + 1)

`column` is the global index along the last dimension, `row` the flat global index over all others,
`bits` the element's bit pattern after casting, as an unsigned integer (of 8 bytes: both halves,
each times an odd number). Keys are odd pseudo-random numbers, so one changed bit always changes the
sum, and swapped, misplaced or skipped elements do but for a chance below 2^-25, also where zeros
are (hence the 1). The product form makes it one integer matrix-vector product per tile, along
whichever dimension is contiguous in memory; modulo 2^32, because processors multiply 32-bit
integers at twice the bytes per second of 64-bit ones. For the same reason two neighbours of 2 bytes
share a key, the right one times 2^16: then both are one 32-bit word.
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
TILE_ELEMENTS = 1 << 17  # fits a large cache, and is below a parameter
CUDA_TILE_ELEMENTS = 1 << 22  # a kernel launch costs as much as 30 MB of reading
# Digits of pi; the last two as odd int32.
_ROW_SALT, _COLUMN_SALT, _PAIR_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0
_LOW_HALF, _HIGH_HALF = 0x082EFA99, 0x6C4E6C89


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
    dtype = target.dtype if target is not None else source.dtype
    column_salt = _PAIR_SALT if dtype.itemsize == 2 else _COLUMN_SALT
    slow, fast = (_ROW_SALT, row), (column_salt, column)
    if source.shape[0] > 1 and (source.shape[1] == 1 or source.stride(0) < source.stride(1)):
        source, target = source.t(), None if target is None else target.t()
        slow, fast = fast, slow
    # From here on the last dimension is the one that is contiguous in the source.
    is_crossed = target is not None and target.stride(1) > target.stride(0)
    is_turned = is_crossed and source.device.type == "cpu"
    is_packed = is_turned or (target is not None and target.dtype != source.dtype)
    num_slow, num_fast = source.shape
    run = min(num_fast, SIDE_ELEMENTS if is_crossed else RUN_ELEMENTS)
    step = min(num_slow, (CUDA_TILE_ELEMENTS if source.is_cuda else TILE_ELEMENTS) // run)
    packed = torch.empty(step * run if is_packed else 0, dtype=dtype, device=source.device)
    turned = torch.empty(step * run if is_turned else 0, dtype=dtype)
    for left in range(0, num_fast, run):
        width = min(run, num_fast - left)
        fast_keys = _keys(fast[0], fast[1] + left, width, source.device)
        ones = fast_keys.sum()
        for top in range(0, num_slow, step):
            height = min(step, num_slow - top)
            values = source[top : top + height, left : left + width]
            if is_packed:
                values = packed[: height * width].view(height, width).copy_(values)
            slow_keys = _keys(slow[0], slow[1] + top, height, source.device)
            total += _keyed_sum(values, slow_keys, fast_keys, fast[0]) + slow_keys.sum() * ones
            if target is None:
                continue
            place = target[top : top + height, left : left + width]
            if is_turned:  # torch turns blocks in the cache, but only between dense tensors
                across = turned[: height * width].view(width, height).copy_(values.t())
                place.t().copy_(across)
            else:
                place.copy_(values)


def _keyed_sum(values: Tensor, slow_keys: Tensor, fast_keys: Tensor, fast_salt: int) -> Tensor:
    """Sum of bits(values) [S, F] * slow_keys [S] * fast_keys [F], an integer []."""
    words, fast_keys = _words(values, fast_keys, is_paired=fast_salt == _PAIR_SALT)
    if words.is_cuda:  # which has no integer matrix-vector product
        return ((words * fast_keys).sum(1) * slow_keys).sum()
    return torch.dot(torch.mv(words, fast_keys), slow_keys)


def _words(values: Tensor, keys: Tensor, *, is_paired: bool) -> tuple[Tensor, Tensor]:
    """The bits of `values` [S, F] as int32 [S, F or F / 2], and the keys that belong to them.

    `is_paired`: the keys are those of pairs of columns; else every element has its own.
    """
    if values.element_size() == 4:
        return values.view(torch.int32), keys
    if values.element_size() == 8:
        halves = values.contiguous().view(torch.int32).unflatten(1, (-1, 2))
        return halves[:, :, 0] * _LOW_HALF + halves[:, :, 1] * _HIGH_HALF, keys
    is_dense = values.stride(1) == 1 and values.stride(0) % 2 == 0
    starts_pair = values.storage_offset() % 2 == 0 and values.shape[1] % 2 == 0
    if is_paired and is_dense and starts_pair and keys.storage_offset() % 2 == 0:
        return values.view(torch.int32), keys[::2].contiguous()
    return values.view(torch.int16).to(torch.int32) & 0xFFFF, keys


def _indices(extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for flat in range(math.prod(extents)):
        index = []
        for extent in reversed(extents):
            flat, last = divmod(flat, extent)
            index.append(last)
        yield tuple(reversed(index))


@functools.cache
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") | 1


def _keys(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """Keys of indices start .. start + count - 1, int32 [count]; usually a view of the cache."""
    first, last = start // RUN_ELEMENTS, (start + count - 1) // RUN_ELEMENTS
    blocks = [_key_block(salt, block, device) for block in range(first, last + 1)]
    keys = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    begin = start - first * RUN_ELEMENTS
    return keys[begin : begin + count]


@functools.lru_cache(maxsize=64)
def _key_block(salt: int, block: int, device: torch.device) -> Tensor:
    """Odd keys of one block of indices: splitmix64 of salt + index; with the salt of pairs those of
    index // 2, times 2^16 where index is odd."""
    index = torch.arange(block * RUN_ELEMENTS, (block + 1) * RUN_ELEMENTS, dtype=torch.int64)
    if salt == _PAIR_SALT:
        return (_mix(index // 2, salt) << (16 * (index % 2))).to(torch.int32).to(device)
    return _mix(index, salt).to(torch.int32).to(device)


def _mix(index: Tensor, salt: int) -> Tensor:
    mixed = index * _signed(0x9E3779B97F4A7C15) + _signed(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shift_right(mixed, shift)) * _signed(factor)
    return (mixed ^ _shift_right(mixed, 31)) | 1


def _shift_right(values: Tensor, shift: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as this unsigned number."""
    return value - (1 << 64) if value >= 1 << 63 else value
