"""Calls of torch as the planner counts them, beside those that are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.planner.simulation.effort import Effort, Walk, walked
from llamarl.publish.fingerprint import fingerprint, transfer

VIEWS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unbind.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
}
BOXES = {
    "whole rows": ((512, 1024), (512, 1024), (0, 0)),
    "some columns of one segment": ((512, 512), (512, 1024), (0, 0)),
    "columns from the middle of a segment on": ((150, 700), (300, 3000), (3, 7)),
    "many short rows": ((5000, 100), (5000, 100), (0, 0)),
    "several blocks of sums": ((9000, 33), (9000, 33), (0, 0)),
    "four long rows": ((4, 16384), (16384, 16384), (100, 0)),
    "a small box": ((16, 64), (64, 64), (48, 0)),
    "a vector": ((1024,), (2048,), (0,)),
    "a stack of matrices": ((2, 64, 96), (4, 64, 96), (1, 0, 0)),
}


class Calls(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, call: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.made["prim" not in str(call) and call] += 1
        return call(*args, **(kwargs or {}))


def counted(run: Callable[[], object]) -> tuple[int, int]:
    """(calls, those that start work) of a second run, when keys are kept."""
    for _ in range(2):
        # On a device without numbers the last call raises, which asks for one.
        with torch.no_grad(), Calls() as calls, suppress(RuntimeError):
            run()
    calls.made.pop(False, None)
    num_views = sum(calls.made[each] for each in VIEWS)
    return calls.made.total(), calls.made.total() - num_views


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtypes", ["float32 float32", "float32 bfloat16", "bfloat16 bfloat16"])
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_calls_of_a_transfer_are_those_that_it_makes(
    device: str, dtypes: str, box: str, dim: int
) -> None:
    shape, global_shape, start = BOXES[box]
    if dim == -2 and (len(shape) < 2 or (device == "cpu" and box == "several blocks of sums")):
        return  # vectors have one dimension; and more keys than are kept
    source_dtype, dtype = dtypes.split()
    source = torch.ones(global_shape, dtype=getattr(torch, source_dtype), device=device)
    values = source[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    target = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if dim == -2:
        target = target.mT.contiguous().mT
    for is_copied in (True, False):
        walk = Walk(
            shape=shape,
            start=start,
            global_shape=global_shape,
            strides=values.stride(),
            source_dtype=source_dtype,
            dtype=dtype if is_copied else source_dtype,
            dim=dim,
            is_copied=is_copied,
        )
        found = walked(walk, device)

        def run(is_copied: bool = is_copied) -> None:
            if is_copied:
                transfer("a", values, target, start, global_shape, dim)
            else:
                fingerprint("a", values, start, global_shape, dim)

        assert (found.num_calls, found.num_launches) == counted(run)
        assert found.num_answers == 1


def test_bytes_of_a_transfer_are_read_written_and_summed_once() -> None:
    walk = Walk(
        shape=(512, 1024),
        start=(0, 0),
        global_shape=(512, 1024),
        strides=(1024, 1),
        source_dtype="bfloat16",
        dtype="bfloat16",
        dim=-1,
        is_copied=True,
    )
    found = walked(walk, "cpu")
    num_bytes = 2 * 512 * 1024
    assert (found.moved_bytes, found.summed_bytes) == (2 * num_bytes, num_bytes)
    assert (found.cached_bytes, found.read_bytes) == (0, 0)


def test_a_cast_reads_the_wider_numbers_and_writes_the_narrower_ones() -> None:
    walk = Walk(
        shape=(512, 1024),
        start=(0, 0),
        global_shape=(512, 1024),
        strides=(1024, 1),
        source_dtype="float32",
        dtype="bfloat16",
        dim=-1,
        is_copied=True,
    )
    found = walked(walk, "cpu")
    num_bytes = 2 * 512 * 1024
    assert found.moved_bytes == 3 * num_bytes, "four bytes read and two written"
    assert found.cached_bytes == 2 * num_bytes, "into a tile and out of it"
    assert found.summed_bytes == num_bytes


def test_efforts_add_up() -> None:
    one = Effort(num_calls=3, num_launches=2, moved_bytes=5, host_bytes=7)
    assert one + one == one.times(2)
    assert one.times(0) == Effort()
