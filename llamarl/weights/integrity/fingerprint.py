"""Fingerprints: 64-bit sums that show whether the right bits are in the right places.

Owns: the sum, and the walk over a box in small tiles, alone or while it is copied. Does not own:
the comparison (`comparison.py`). Invariant: sums over disjoint boxes of a parameter add up, modulo
2^64, to the sum over their union, whatever the layout.

    fingerprint(name) = sum over elements e of
                        key(name) * key(row(e)) * key(column(e)) * (bits(e) + 1)

`column` is the global index along the last dimension, `row` the flat global index over all others,
`bits` the element's bit pattern after casting, as a signed integer. Keys are odd pseudo-random
64-bit numbers, so one changed bit always changes the sum, and swapped, misplaced or skipped
elements do except with a chance below 2^-31, also among zeros (hence the 1). The product form makes
it one integer matrix-vector product per tile, along whichever dimension is contiguous in memory.
Modulo 2^32, twice as fast, two changed signs would cancel: 2^31 times any odd number is 2^31.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.weights.integrity.comparison import MODULUS

RUN_ELEMENTS = 8192  # longest stretch of the contiguous dimension in a tile
SIDE_ELEMENTS = 128  # the same where one side is transposed: lines of both stay in the cache
TILE_ELEMENTS = 1 << 17  # with its int64 copy it fits a large cache, and is below a parameter
DEVICE_TILE_ELEMENTS = 1 << 22  # a kernel launch costs as much as 30 MB of reading
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
    total, sums = 0, []
    for outer in itertools.product(*map(range, source.shape[:-2])):
        row = start[-2]
        for dim, index in enumerate(outer):
            row += (start[dim] + index) * math.prod(shape[dim + 1 : -1])
        plane = target[outer] if outer and target is not None else target
        ones, tiles = _plane_sums(source[outer] if outer else source, plane, row, start[-1])
        total += ones
        sums += tiles
    total += int(sums[0] if len(sums) == 1 else torch.stack(sums).sum())
    return total * _name_key(name) % MODULUS


def _plane_sums(
    source: Tensor, target: Tensor | None, row: int, column: int
) -> tuple[int, list[Tensor]]:
    """The keyed sum over `source` [R, C] before the key of the name: of the ones, and of the bits,
    int64 [], tile by tile.

    A publish of a small model is mostly calls of torch, each of which waits for the thread that
    decodes: a plane of one tile makes as few of them as possible.
    """
    slow, fast = (_ROW_SALT, row), (_COLUMN_SALT, column)
    if source.shape[0] > 1 and (source.shape[1] == 1 or source.stride(0) < source.stride(1)):
        source, target = source.t(), None if target is None else target.t()
        slow, fast = fast, slow
    # From here on the last dimension is the one that is contiguous in the source.
    is_crossed = target is not None and target.stride(1) > target.stride(0)
    is_turned = is_crossed and source.device.type == "cpu"
    is_packed = is_turned or (target is not None and target.dtype != source.dtype)
    dtype, device = target.dtype if target is not None else source.dtype, source.device
    num_slow, num_fast = source.shape
    run = min(num_fast, SIDE_ELEMENTS if is_crossed else RUN_ELEMENTS)
    step = min(
        num_slow, (DEVICE_TILE_ELEMENTS if source.device.type != "cpu" else TILE_ELEMENTS) // run
    )
    wide = torch.empty((step, run), dtype=torch.int64, device=device)
    packed = torch.empty((step, run), dtype=dtype, device=device) if is_packed else None
    turned = torch.empty((run, step), dtype=dtype) if is_turned else None
    sums: list[Tensor] = []
    for left in range(0, num_fast, run):
        width = min(run, num_fast - left)
        fast_keys = _keys(fast[0], fast[1] + left, width, device)
        for top in range(0, num_slow, step):
            height = min(step, num_slow - top)
            values = _tile(source, top, left, height, width)
            if packed is not None:
                values = _front(packed, height, width).copy_(values)
            bits = _front(wide, height, width).copy_(values.view(_BITS[dtype.itemsize]))
            sums.append(_keyed_sum(bits, _keys(slow[0], slow[1] + top, height, device), fast_keys))
            if target is None:
                continue
            place = _tile(target, top, left, height, width)
            if turned is not None:  # torch turns blocks in the cache only between dense tensors
                place.t().copy_(_front(turned, width, height).copy_(values.t()))
            else:
                place.copy_(values)
    return _key_sum(*slow, num_slow) * _key_sum(*fast, num_fast), sums


def _tile(plane: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A tile of `plane` [R, C]; `plane` itself if that is all."""
    is_whole = plane.shape == (height, width)
    return plane if is_whole else plane[top : top + height, left : left + width]


def _front(buffer: Tensor, height: int, width: int) -> Tensor:
    """A dense [height, width] at the start of `buffer`; itself if that is all."""
    is_whole = buffer.shape == (height, width)
    return buffer if is_whole else buffer.view(-1)[: height * width].view(height, width)


def _keyed_sum(bits: Tensor, slow_keys: Tensor, fast_keys: Tensor) -> Tensor:
    """Sum of bits [S, F] * slow_keys [S] * fast_keys [F], int64 []; may overwrite `bits`."""
    if bits.device.type != "cpu":  # which has no integer matrix-vector product
        return bits.mul_(fast_keys).sum(1).mul_(slow_keys).sum()
    return torch.dot(torch.mv(bits, fast_keys), slow_keys)


@functools.cache
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


@functools.lru_cache(maxsize=256)  # every publish asks for the same ones
def _keys(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """Keys of indices start .. start + count - 1, int64 [count]; usually a view of a block."""
    first, last = start // RUN_ELEMENTS, (start + count - 1) // RUN_ELEMENTS
    blocks = [_key_block(salt, block, device) for block in range(first, last + 1)]
    begin = start - first * RUN_ELEMENTS
    return (blocks[0] if first == last else torch.cat(blocks))[begin : begin + count]


@functools.lru_cache(maxsize=4096)
def _key_sum(salt: int, start: int, count: int) -> int:
    """Sum of the keys of indices start .. start + count - 1."""
    total, cpu = 0, torch.device("cpu")
    for first in range(start, start + count, RUN_ELEMENTS):
        total += int(_keys(salt, first, min(RUN_ELEMENTS, start + count - first), cpu).sum())
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
