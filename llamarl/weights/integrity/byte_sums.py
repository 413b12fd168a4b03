"""Keyed sums of rows of bytes: the part of a fingerprint that reads every byte.

Owns: the keys of bytes and the product with them, by the fastest exact way that the device has.
Does not own: what becomes of the sums (`fingerprint.py`). Invariant: every way gives the same
integers.

On CPUs `torch._int_mm` of a matrix with one column reads at several times the speed of a copy, as
it multiplies 64 bytes at once; with a second column it is six times slower, so each set of keys has
a product of its own. On processors without instructions for it, it may round: there the bytes are
multiplied as float32, few enough at a time to be exact. Devices that want several columns at once
get them; what they cannot take is padded with zeros first,
and multiplied as float64 where the card refuses it all the same.
"""

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

NUM_KEYS = 2  # independent sets of keys
SEGMENT_BYTES = 3 << 10  # longest row; longer ones share lines of the cache
_MATRIX_COLUMNS = 8
MATRIX_BLOCK = 16  # cuBLASLt multiplies int8 by whole blocks of rows and of bytes
FEWEST_ROWS = 32  # which torch wants to be above 16
_EXACT_BYTES = 1 << 10  # products of so many signed bytes add up exactly in float32
_int_mm = torch._int_mm


@functools.lru_cache(maxsize=256)
def byte_keys(place: int, num_bytes: int, device: torch.device) -> tuple[Tensor, ...]:
    """The keys of these bytes of a segment, as `add_bytes` takes them: int8 [num_bytes, 1] for each
    set, or float32; or side by side in one matrix, with columns of zeros, for other devices."""
    columns = tuple(_keys(number)[place : place + num_bytes] for number in range(NUM_KEYS))
    if device.type == "cpu":
        return columns if _is_exact() else tuple(column.to(torch.float32) for column in columns)
    return (side_by_side(columns).to(device),)


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Sets of keys as one matrix, in the order that cuBLASLt's int8 products take everywhere and
    fastest: the keys of a set next to each other."""
    matrix = torch.cat([*columns], dim=1)
    added = (0, _MATRIX_COLUMNS - len(columns), 0, -len(matrix) % MATRIX_BLOCK)
    return functional.pad(matrix, added).t().contiguous().t()


def add_bytes(values: Tensor, outs: Sequence[Tensor], keys: tuple[Tensor, ...]) -> None:
    """Fill `outs`, an int32 [R, 1] for each set of keys, with the keyed sums of `values` (int8
    [R, C]); `keys` are those of its bytes."""
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


def key_sum(number: int, place: int, num_bytes: int) -> int:
    """Sum of the keys of these bytes, of one set."""
    sums = _key_sums(number)
    return sums[place + num_bytes] - sums[place]


@functools.cache
def _keys(number: int) -> Tensor:
    """The keys of one set, int8 [SEGMENT_BYTES, 1]: the bytes of a hash that are not 0."""
    digest = hashlib.shake_256(f"keys of bytes, set {number}".encode()).digest(2 * SEGMENT_BYTES)
    keys = torch.tensor([byte for byte in digest if byte][:SEGMENT_BYTES], dtype=torch.uint8)
    return keys.view(torch.int8).unsqueeze(1)


@functools.cache
def _key_sums(number: int) -> list[int]:
    """The sum of the first i keys, at i."""
    return [0, *_keys(number).flatten().to(torch.int64).cumsum(0).tolist()]


@functools.cache
def _is_exact() -> bool:
    """Whether this processor's product does not round: asked with the largest numbers."""
    values = torch.full((4, SEGMENT_BYTES), -128, dtype=torch.int8)
    values[1], values[2, ::2], values[3] = 127, 127, -1
    keys = torch.full((SEGMENT_BYTES, 1), -128, dtype=torch.int8)
    keys[::3] = 127
    expected = values.to(torch.int64) @ keys.to(torch.int64)
    return torch.equal(_int_mm(values, keys).to(torch.int64), expected)
