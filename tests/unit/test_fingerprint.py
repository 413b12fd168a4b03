"""The fingerprint: additive over layouts, sensitive to bits and places, small in memory."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.weights.integrity.comparison import MODULUS
from llamarl.weights.integrity.fingerprint import TILE_ELEMENTS, fingerprint, transfer
from tests.allocation import LargestAllocation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def whole(name, weights):
    return fingerprint(name, weights, [0] * weights.ndim, weights.shape)


def splitmix(value):
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def by_definition(name, weights):
    """The documented sum, element by element, in Python's integers."""
    bits = weights.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.itemsize]
    )
    columns = weights.shape[-1] if weights.ndim else 1
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
    total = 0
    for flat, value in enumerate(bits.flatten().tolist()):
        row, column = divmod(flat, columns)
        row_key = splitmix(row * 0x9E3779B97F4A7C15 + 0x243F6A8885A308D3) | 1
        column_key = splitmix(column * 0x9E3779B97F4A7C15 + 0x13198A2E03707344) | 1
        total += key * row_key * column_key * (value + 1)
    return total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(), (1,), (9000,), (5, 7), (3, 8200), (8200, 2), (2, 3, 5), (2, 2, 3, 4)]
)
def test_the_sum_is_the_documented_one(shape, dtype) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert whole("layers.0.w", weights) == by_definition("layers.0.w", weights)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_partial_sums_of_any_cutting_add_up_to_the_whole(data) -> None:
    shape = data.draw(
        st.sampled_from([(20000,), (3, 9000), (9000, 3), (130, 140), (4, 50, 60), (3, 2, 5, 7)])
    )
    weights = torch.randn(shape).to(data.draw(st.sampled_from(DTYPES)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(1, 4))):
        start, stop = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(start[dim], stop[dim]))
        boxes.append((start, (*stop[:dim], at, *stop[dim + 1 :])))
        boxes.append(((*start[:dim], at, *start[dim + 1 :]), stop))
    total = 0
    for start, stop in boxes:
        box = weights[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        if data.draw(st.booleans()):
            box = box.mT.contiguous().mT if box.ndim > 1 else box.clone()  # other strides
        total += fingerprint("w", box, start, shape)
    assert total % MODULUS == whole("w", weights)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 129), st.integers(0, 139), st.integers(0, 31))
def test_one_flipped_bit_always_changes_it(row, column, bit) -> None:
    weights = torch.ones(130, 140)
    before = whole("w", weights)
    weights.view(torch.int32)[row, column] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert whole("w", weights) != before


def damaged(kind, weights):
    if kind == "two elements swapped":
        weights[[3, 90], [5, 7]] = weights[[90, 3], [7, 5]]
    elif kind == "two rows swapped":
        weights[[3, 90]] = weights[[90, 3]]
    elif kind == "two columns swapped":
        weights[:, [3, 90]] = weights[:, [90, 3]]
    elif kind == "shifted by a row":
        weights.copy_(weights.roll(1, 0))
    elif kind == "shifted by an element":
        weights.copy_(weights.flatten().roll(1).view_as(weights))
    elif kind == "slice skipped":
        weights[64:] = 0
    elif kind == "zero got a sign":
        weights[0, 0] = -0.0
    elif kind == "two signs changed":
        weights[[3, 90], [5, 7]] *= -1
    elif kind == "all signs changed":
        weights.neg_()
    elif kind == "transposed":
        weights[:100, :100] = weights[:100, :100].T.clone()
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        "two elements swapped", "two rows swapped", "two columns swapped", "shifted by a row",
        "shifted by an element", "slice skipped", "zero got a sign", "transposed",
        "two signs changed", "all signs changed",
    ],
)  # fmt: skip
def test_wrong_places_and_bits_change_it(kind, dtype) -> None:
    weights = torch.randn(130, 140).to(dtype)
    weights[0, 0] = 0.0
    assert whole("w", damaged(kind, weights.clone())) != whole("w", weights)


def test_a_box_left_out_counts_even_if_zeros_lie_there() -> None:
    weights = torch.zeros(130, 140)
    assert fingerprint("w", weights[:64], (0, 0), (130, 140)) != whole("w", weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (9000,), (300, 700), (3, 50, 60)])
def test_a_transfer_casts_and_returns_the_fingerprint_of_what_it_wrote(shape, dtype) -> None:
    weights = torch.randn(shape)
    plain = torch.empty(shape, dtype=dtype)
    crossed = torch.empty(shape[::-1], dtype=dtype)
    crossed = crossed.permute(tuple(reversed(range(crossed.ndim))))
    for target in (plain, crossed):
        start = [0] * weights.ndim
        assert transfer("w", weights, target, start, shape) == whole("w", weights.to(dtype))
        assert torch.equal(target, weights.to(dtype))


def test_the_name_counts() -> None:
    assert whole("a", torch.ones(3)) != whole("b", torch.ones(3))


@pytest.mark.parametrize(
    "shape", [(1000, 1000), (10**6,), (10**6, 1), (10, 10**5), (1000, 10, 100)]
)
def test_it_works_in_tiles_whatever_the_shape(shape) -> None:
    weights = torch.randn(shape)
    with LargestAllocation() as watch:
        whole("w", weights)
        whole("w", weights.mT if weights.ndim > 1 else weights)
    assert 0 < watch.num_bytes <= 8 * TILE_ELEMENTS
