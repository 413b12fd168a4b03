"""Matrix products: what the card reaches, which products of bytes it takes, and which layout of
weights decodes faster.

A publish sums bytes with int8 products; whether a card takes one depends on its shape and layout
in a way that is not documented. So a grid of shapes is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
from gpu_bench.setting import Setting, synchronize
from sections import Facts
from torch import Tensor

from gpu_session.timing import graphed_s, median_s, read_us
from llamarl.generator.engine.weights import widened_mm
from llamarl.publish.fingerprint import NUM_KEYS, add_bytes, byte_keys, fingerprint, transfer

ROWS = (17, 24, 32, 48, 203, 208, 1024, 1032)
BYTES = (8, 16, 24, 48, 64, 192, 600, 608, 2048, 3072)
COLUMNS = (8, 16, 32)
LAYOUTS = ("row-major", "column-major")  # of the second matrix
NUM_MATRICES = 8  # multiplied in turns: together they are larger than the card's caches
RIGHT, WRONG = "right", "wrong"


def ceilings(setting: Setting) -> Iterator[Facts]:
    """A copy within the device, and a large product of bfloat16."""
    size = 1 << (30 if setting.is_cuda else 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    copy_s = median_s(setting, lambda: target.copy_(source))
    yield Facts({"read_and_write_gb_per_s": 2 * size / copy_s / 1e9})
    side = 8192 if setting.is_cuda else 128
    left, right = (_normal(setting, side, side) for _ in range(2))
    product_s = median_s(setting, lambda: left @ right, 10)
    yield Facts({"product_tflop_per_s": 2 * side**3 / product_s / 1e12})


def int_mm(setting: Setting) -> Iterator[Facts]:
    """Which shapes of int8 products are right, refused or wrong in either layout; the sums that a
    publish makes of the same bytes; and the time of a large product."""
    device, draw = torch.device(setting.device), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, generator=draw)

    refusals: dict[str, Counter[str]] = {layout: Counter() for layout in LAYOUTS}
    for num_rows in ROWS:
        values = {num_bytes: drawn(num_rows, num_bytes) for num_bytes in BYTES}
        for num_columns in COLUMNS:
            for layout in LAYOUTS:
                found: dict[str, list[int]] = {RIGHT: [], "refused": [], WRONG: []}
                for num_bytes in BYTES:
                    matrix = drawn(num_bytes, num_columns)
                    answer = _asked(values[num_bytes].to(device), matrix.to(device), layout)
                    if answer not in (RIGHT, WRONG):
                        refusals[layout][answer] += 1
                    found[answer if answer in found else "refused"].append(num_bytes)
                shown = {f"{name}_with_bytes": each for name, each in found.items() if each}
                yield Facts(shown, f"{layout}, {num_rows} rows, {num_columns} columns")
        wrong = [size for size, each in values.items() if not _is_summed_right(each, device)]
        yield Facts({"sums_wrong_with_bytes": wrong}, f"{num_rows} rows")
    for layout, words in refusals.items():
        for number, (why, count) in enumerate(words.most_common()):
            yield Facts({f"refusal_{number}": f"{count} shapes: {why}"}, layout)
    shape = (65536, 2048) if setting.is_cuda else (64, 256)
    large, keys = drawn(*shape).to(device), drawn(shape[1], 8).to(device)
    for layout in LAYOUTS:
        if _asked(large, keys, layout) == RIGHT:
            product = partial(torch._int_mm, large, _laid(keys, layout))
            yield Facts({"large_product_us": graphed_s(setting, product) * 1e6}, layout)


def _laid(matrix: Tensor, layout: str) -> Tensor:
    return matrix if layout == LAYOUTS[0] else matrix.t().contiguous().t()


def _asked(values: Tensor, matrix: Tensor, layout: str) -> str:
    """RIGHT, WRONG, or the words of the refusal."""
    want = values[:1032].cpu().double() @ matrix.cpu().double()  # exact: far below 2^53
    try:
        got = torch._int_mm(values, _laid(matrix, layout))[:1032].cpu()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:200]
    return RIGHT if torch.equal(got.double(), want) else WRONG


def _is_summed_right(values: Tensor, device: torch.device) -> bool:
    """Whether the keyed sums of these bytes are the CPU's."""
    sums = []
    for place in (device, torch.device("cpu")):
        outs = [
            torch.empty(len(values), 1, dtype=torch.int32, device=place) for _ in range(NUM_KEYS)
        ]
        add_bytes(values.to(place), outs, byte_keys(0, values.shape[1], place))
        sums.append([out.cpu() for out in outs])
    return all(map(torch.equal, *sums))


def fingerprints(setting: Setting) -> Iterator[Facts]:
    """Whether a copy with its fingerprint gives the CPU's fingerprint, along either dimension, and
    how fast it is."""
    rows, columns = shape = (8192, 2048) if setting.is_cuda else (64, 96)
    source = torch.randn(shape, device=setting.device)
    layouts = {
        -1: torch.empty(shape, dtype=torch.bfloat16, device=setting.device),
        -2: torch.empty(columns, rows, dtype=torch.bfloat16, device=setting.device).t(),
    }
    for dim, target in layouts.items():
        found = transfer("weight", source, target, [0, 0], shape, dim)
        want = fingerprint("weight", source.bfloat16().cpu(), [0, 0], shape, dim)
        is_copied = torch.equal(target, source.bfloat16())
        of = f"along dimension {dim}"
        yield Facts({"is_the_cpus": found == want, "is_copied": is_copied}, of)
        synchronize(setting)
        start_s = time.perf_counter()
        for _ in range(5):
            transfer("weight", source, target, [0, 0], shape, dim)
        rate = 5 * target.nbytes / (time.perf_counter() - start_s) / 1e9
        yield Facts({"bf16_gb_per_s": rate}, of)


def gemm(setting: Setting) -> Iterator[Facts]:
    """The products of a decode step with weights stored [in, out] and [out, in], against reading
    the weights once."""
    model = setting.model
    hidden, head_dim = model["hidden_size"], model["head_dim"]
    width, kv_width = (head_dim * model[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    inner = model["intermediate_size"]
    shapes = {
        "qkv": (hidden, width + 2 * kv_width),
        "output": (width, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    for num_rows in setting.batches:
        for name, (num_in, num_out) in shapes.items():
            x = _normal(setting, num_rows, num_in)
            matrices = [_normal(setting, num_out, num_in).t() for _ in range(NUM_MATRICES)]
            turned = [each.contiguous() for each in matrices]
            facts = {
                f"{layout}_us": _turns_us(setting, x, each)
                for layout, each in (("in_out", turned), ("out_in", matrices))
            }
            facts["floor_us"] = read_us(setting, 2 * num_in * num_out)
            yield Facts(facts, f"{num_rows} rows, {name}")
        yield Facts(_head(setting, num_rows), f"{num_rows} rows, head")


def _turns_us(setting: Setting, x: Tensor, matrices: list[Tensor]) -> float:
    took_s = graphed_s(setting, lambda: [torch.mm(x, each) for each in matrices], 3)
    return took_s / len(matrices) * 1e6


def _head(setting: Setting, num_rows: int) -> dict[str, float]:
    """The product with float32 results."""
    shape = setting.model["vocab_size"], setting.model["hidden_size"]
    matrix, x = _normal(setting, *shape), _normal(setting, num_rows, shape[1])
    took_s = graphed_s(setting, lambda: widened_mm(x, matrix.t()), 5)
    return {"out_in_us": took_s * 1e6, "floor_us": read_us(setting, matrix.nbytes)}


def _normal(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
