"""Fingerprints: additive over layouts, sensitive to bits and places, in tiles, taken early."""

import hashlib
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.device.devices import PLATFORMS
from llamarl.publish import fingerprint as byte_sums
from llamarl.publish import fingerprint as fingerprints
from llamarl.publish.comparison import MODULUS
from llamarl.publish.fingerprint import (
    NUM_KEYS,
    SEGMENT_BYTES,
    fingerprint,
    line_dim,
    segment_elements,
    transfer,
)
from llamarl.publish.target import EarlySums
from tests.allocation import LargestAllocation
from tests.random_search import case, searched

TILE_BYTES = PLATFORMS["cpu"].tile_bytes
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]
DTYPES += [torch.float8_e4m3fn]


def whole(name, weights, dim=-1):
    return fingerprint(name, weights, [0] * weights.ndim, weights.shape, dim)


def random_weights(shape, dtype, seed=0):
    """Any bits, so also those of no number."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    made = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    return made.view(dtype)


def splitmix(value):
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def byte_key(number, place):
    digest = hashlib.shake_256(f"keys of bytes, set {number}".encode()).digest(2 * SEGMENT_BYTES)
    key = [byte for byte in digest if byte][place]
    return key - 256 if key > 127 else key


BYTE_KEYS = [[byte_key(number, place) for place in range(20)] for number in range(NUM_KEYS)]


def by_definition(name, weights, dim=-1):
    """The documented sum, byte by byte, in Python's integers."""
    weights = weights.reshape((1,) * max(0, 2 - weights.ndim) + tuple(weights.shape))
    weights = weights.mT if dim == -2 else weights
    columns, itemsize = weights.shape[-1], weights.itemsize
    segment = segment_elements(columns, itemsize) * itemsize
    keys = [byte_sums._column_keys(number).flatten().tolist() for number in range(NUM_KEYS)]
    assert [each[:20] for each in keys] == BYTE_KEYS
    name_key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
    lines = weights.contiguous().view(torch.int8).reshape(-1, columns * itemsize).tolist()
    total = 0
    for row, line in enumerate(lines):
        for begin in range(0, len(line), segment):
            for number in range(NUM_KEYS):
                found = line[begin : begin + segment]
                inner = sum(key * (byte + 129) for key, byte in zip(keys[number], found))  # noqa: B905
                row_key = splitmix(row * 0x9E3779B97F4A7C15 + 0x243F6A8885A308D3 + number) | 1
                index = begin // segment
                segment_key = splitmix(index * 0x9E3779B97F4A7C15 + 0x13198A2E03707344 + number) | 1
                total += row_key * segment_key * inner
    return name_key * total % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(), (1,), (9000,), (5, 7), (3, 4201), (410, 2), (2, 3, 5), (2, 2, 3, 4), (9, 1409)]
)
def test_the_sum_is_the_documented_one(shape, dtype) -> None:
    weights = random_weights(shape, dtype).reshape(shape)
    for dim in (-1, -2)[: max(1, min(2, len(shape)))]:
        assert whole("layers.0.w", weights, dim) == by_definition("layers.0.w", weights, dim)


def test_a_processor_whose_product_rounds_gets_the_same_sums(monkeypatch) -> None:
    largest = byte_sums._column_keys(0)[:3000, 0].sign().expand(9, 3000) * 127
    weights = largest.clone()  # sums that float32 would round, odd and even
    for row in range(9):
        weights[row, :row] //= 2
    before = whole("w", weights)

    def forget():
        byte_sums.byte_keys.cache_clear()
        fingerprints._cuts.cache_clear()

    forget()
    monkeypatch.setattr(byte_sums, "_int_mm", None)
    monkeypatch.setattr(byte_sums, "_is_exact", lambda: False)
    assert whole("w", weights) == before
    forget()


@pytest.mark.parametrize(
    ("rows", "num_bytes"), [(48, 64), (3, 64), (48, 61), (203, 192), (1024, 600), (17, 1)]
)
def test_a_device_that_wants_several_columns_gets_the_same_sums(
    rows, num_bytes, monkeypatch
) -> None:
    """What an H100 takes was tried: rows that lie one after the other, columns of keys likewise,
    whole blocks of 16 rows and bytes."""
    values = random_weights((rows, num_bytes + 3), torch.int8)[:, :num_bytes]
    columns = byte_sums.byte_keys(5, num_bytes, torch.device("cpu"))
    keys = byte_sums.side_by_side(columns)
    found = torch.empty(2, NUM_KEYS, rows, 1, dtype=torch.int32)
    byte_sums.add_bytes(values, found[0].unbind(), columns)

    def cublas_product(values, matrix):
        assert values.is_contiguous()
        assert matrix.t().is_contiguous()
        assert len(values) % 16 == values.shape[1] % 16 == matrix.shape[1] % 8 == 0
        assert len(values) > 16
        return torch._int_mm(values, matrix)

    monkeypatch.setattr(byte_sums, "_int_mm", cublas_product)
    byte_sums.add_bytes(values, found[1].unbind(), (keys,))
    assert torch.equal(*found)

    def refused(values, matrix):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(byte_sums, "_int_mm", refused)
    byte_sums.add_bytes(values, found[1].zero_().unbind(), (keys,))
    assert torch.equal(*found)


def test_bytes_with_equal_keys_are_as_rare_as_chance_has_them() -> None:
    keys = torch.cat([byte_sums._column_keys(number) for number in range(NUM_KEYS)], dim=1)
    assert (keys != 0).all()
    for sign in (1, -1):  # two equal errors, or opposite ones, hide each other
        alike = (keys[:, None] == sign * keys[None]).all(2).triu(1).sum()
        expected = SEGMENT_BYTES * (SEGMENT_BYTES - 1) / 2 / 255**NUM_KEYS
        assert abs(alike - expected) < 5 * expected**0.5


def cut(draw, shape):
    """Boxes (start, stop) that make up all of it."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(1, 4))):
        start, stop = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(start[dim], stop[dim]))
        boxes.append((start, (*stop[:dim], at, *stop[dim + 1 :])))
        boxes.append(((*start[:dim], at, *start[dim + 1 :]), stop))
    return boxes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_partial_sums_of_any_cutting_add_up_to_the_whole(data) -> None:
    shape = data.draw(
        st.sampled_from([(9000,), (3, 4000), (900, 3), (130, 140), (4, 50, 60), (3, 2, 5, 7)])
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    dim = data.draw(st.sampled_from([-1, -2][: len(shape)]))
    weights = random_weights(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        sizes = {
            "tile_bytes": [3000, 20000, TILE_BYTES],
            "summed_bytes": [3000, 20000, 1 << 22],
            "max_sums": [20, 1 << 13, 1 << 17],
        }
        for name, values in sizes.items():
            patch.setattr(PLATFORMS["cpu"], name, data.draw(st.sampled_from(values)))
        total = 0
        for start, stop in cut(data.draw, shape):
            box = weights[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            if data.draw(st.booleans()):
                box = box.mT.contiguous().mT if box.ndim > 1 else box.clone()  # other strides
            total += fingerprint("w", box, start, shape, dim)
    assert total % MODULUS == whole("w", weights, dim)


def damage_at_random(rng, flat, weights):
    """Change one bit or many, or exchange, move, repeat or erase bytes or lines."""
    here, there = rng.sample(range(len(flat)), 2)
    count = rng.randint(1, len(flat) // 2)
    lines = weights.view(torch.int8).reshape(-1, weights.shape[-1] * weights.itemsize)
    kind = rng.randrange(8)
    if kind == 0:
        flat[here : here + count] ^= rng.randint(1, 127)
    elif kind == 1:
        flat[here] ^= 1 << rng.randrange(7)
    elif kind == 2:
        flat[here] ^= -128
    elif kind == 3:
        flat[[here, there]] = flat[[there, here]]
    elif kind == 4:
        flat.copy_(flat.roll(count))
    elif kind == 5:
        flat[:count] = flat[-count:].clone()
    elif kind == 6:
        lines.copy_(lines.roll(rng.randint(1, max(1, len(lines) - 1)), 0))
    else:
        flat[here:].zero_()


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_changes_it_as_the_oracle_says(seed) -> None:
    rng = random.Random(seed)
    shape = rng.choice([(40,), (6, 50), (3, 4, 20), (50, 6)])
    dtype = rng.choice(DTYPES)
    weights = random_weights(shape, dtype, seed)
    other = weights.clone()
    for _ in range(rng.randint(1, 3)):
        damage_at_random(rng, other.view(torch.int8).view(-1), other)
    for dim in (-1, -2)[: len(shape)]:
        assert whole("w", other, dim) == by_definition("w", other, dim), f"seed {seed}"
        is_same = torch.equal(weights.view(torch.int8), other.view(torch.int8))
        assert (whole("w", other, dim) == whole("w", weights, dim)) == is_same, f"seed {seed}"


def test_a_box_left_out_counts_whatever_lies_there() -> None:
    for value in (0, -1, -128, 127):  # of every byte
        weights = torch.full((130, 560), value, dtype=torch.int8).view(torch.float32)
        assert fingerprint("w", weights[:64], (0, 0), (130, 140), -1) != whole("w", weights)
        assert fingerprint("w", weights[:, 1:], (0, 1), (130, 140), -1) != whole("w", weights)


def bytes_of(weights):
    return weights.contiguous().flatten().view(torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (9000,), (300, 700), (3, 50, 60), (1, 40), (40, 1)])
def test_a_transfer_casts_and_returns_the_fingerprint_of_what_it_wrote(shape, dtype) -> None:
    weights = torch.randn(shape)
    sources = [weights, weights.mT.contiguous().mT] if weights.ndim > 1 else [weights]
    plain = torch.empty(shape, dtype=dtype)
    crossed = torch.empty(shape[::-1], dtype=dtype)
    crossed = crossed.permute(tuple(reversed(range(crossed.ndim))))
    for source in sources:
        for target in (plain, crossed):
            start, dim = [0] * weights.ndim, line_dim(shape, target.stride())
            sent = transfer("w", source, target, start, shape, dim)
            assert sent == whole("w", weights.to(dtype), dim)
            assert sent == fingerprint("w", target, start, shape, dim)
            assert torch.equal(bytes_of(target), bytes_of(weights.to(dtype)))


@pytest.mark.parametrize(
    "shape", [(1000, 1000), (10**6,), (10**6, 1), (10, 10**5), (100, 10, 1000)]
)
def test_it_works_in_tiles_whatever_the_shape(shape) -> None:
    weights = torch.randn(shape)
    with LargestAllocation() as watch:
        for dim in (-1, -2)[: len(shape)]:
            whole("w", weights, dim)
            whole("w", weights.mT if weights.ndim > 1 else weights, dim)
    assert 0 < watch.num_bytes <= TILE_BYTES


@searched(few=300, many=5000)
def test_each_sum_is_taken_once_and_after_its_parameter_has_come(seeds: range) -> None:
    """Parameters come in any order, from several threads, or are never said to have come."""
    for seed in seeds:
        with case(seed):
            check_a_version(random.Random(seed))


def check_a_version(rng: random.Random) -> None:
    names = [f"w{i}" for i in range(rng.randint(0, 12))]
    values = {name: rng.randrange(1 << 40) for name in names}
    memory: dict[str, int] = {}
    taken: list[str] = []

    def take(name: str) -> int:
        taken.append(name)
        return memory[name]

    sums = EarlySums(take)
    said = [name for name in names if rng.random() < 0.7]
    rng.shuffle(said)

    def come(part: list[str]) -> None:
        for name in part:
            memory[name] = values[name]
            sums.add(name)

    cut = rng.randint(0, len(said))
    threads = [threading.Thread(target=come, args=(part,)) for part in (said[:cut], said[cut:])]
    for thread in threads:
        thread.start()
    if rng.random() < 0.3:
        sums.stop()
        num_taken = len(taken)
        for thread in threads:
            thread.join()
        with pytest.raises(RuntimeError, match="the version was given up"):
            sums.finish(names)
        assert len(taken) == num_taken, "nothing is read any more"
        return
    for thread in threads:
        thread.join()
    memory |= values
    assert sums.finish(names) == values
    assert sorted(taken) == sorted(names)


def test_what_a_sum_raises_comes_out_of_finish() -> None:
    def take(name: str) -> int:
        raise RuntimeError(f"{name} cannot be read")

    sums = EarlySums(take)
    sums.add("w")
    with pytest.raises(RuntimeError, match="w cannot be read"):
        sums.finish(["w"])
