"""The decode step as each kind of device likes it.

Owns: which rows a step computes, in which order, and how its kernels are started. Does not own: the
maths (`decoder.py`), drawing tokens, or rollouts (`running.py`). Invariant: row i of the logits is
that of slot `slots[i]`.

On CPUs arithmetic is dear and calls are cheap: only rollouts are computed, the longest first. On
GPUs a step of a small batch costs as much as that of a large one, but each call costs: rows are
slots in order, padded to few sizes, so that a step is one of few shapes and each shape is captured
once as a CUDA graph. Rows in between that are no rollouts compute what nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamarl.generation.cpu_kv_cache import PLAN_STEPS, CpuKVCache, RowGroup
from llamarl.generation.cuda_kv_cache import CudaKVCache
from llamarl.generation.decoder import Decoder
from llamarl.generation.graphs import Replay
from llamarl.generation.running_rollouts import RunningRollouts

SHORTEST = 128  # the smallest length that padded rows read


class Steps(Protocol):
    """Computes logits, row by row. `keeps_addresses`: weights must be overwritten, not replaced."""

    keeps_addresses: bool

    def arrange(self, running: RunningRollouts) -> tuple[np.ndarray, np.ndarray | slice]:
        """For the next PLAN_STEPS steps: the slot of each row, and which rows are rollouts."""

    def compute(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits float32 [n, vocab] after `tokens` int32 [n] at `positions` int64 [n]."""

    def forget(self) -> None:
        """Addresses of weights or cache change: hold on to none."""


class EagerSteps:
    """One call after the other, over rollouts alone."""

    keeps_addresses = False

    def __init__(self, decoder: Decoder, cache: CpuKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._groups: list[RowGroup] = []
        self._slots = np.empty(0, np.int64)
        self._num_computed = 0  # since `arrange`

    def arrange(self, running: RunningRollouts) -> tuple[np.ndarray, slice]:
        self._slots = running.by_length()
        self._groups = self._cache.plan(self._slots, running.cached[self._slots] + 1)
        self._num_computed = 0
        return self._slots, slice(None)

    def compute(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        device = self._cache.device
        place = torch.from_numpy(positions).to(device)
        if self._num_computed:
            self._cache.lengthen(self._groups, place)
        self._num_computed += 1
        places = self._cache.places(self._slots, positions)
        ids = torch.from_numpy(tokens).to(device)
        return self._decoder.decode(ids, place, places, self._groups)

    def forget(self) -> None:
        """It holds none."""


class Graphs(Protocol):
    """What records a step, to be replayed: `graphs.CudaGraphs`."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Run `compute` once or more; the replay does the same at the same addresses."""

    def forget(self) -> None:
        """Nothing that was recorded will be replayed any more."""


class PaddedSteps:
    """Few shapes, each recorded by `graphs` when it first occurs; None computes call by call."""

    def __init__(self, decoder: Decoder, cache: CudaKVCache, graphs: Graphs | None) -> None:
        self.keeps_addresses = graphs is not None
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._num_rows = self._length = 0
        is_cuda = cache.device.type == "cuda"
        # Tokens and positions, in host memory and at the addresses that the graphs read.
        shape = (2, cache.num_slots)
        self._input = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._static = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def arrange(self, running: RunningRollouts) -> tuple[np.ndarray, np.ndarray]:
        occupied = np.flatnonzero(running.occupied)
        if not len(occupied):
            return occupied, occupied
        self._num_rows = padded_rows(int(occupied[-1]) + 1, self._cache.num_slots)
        longest = int(running.cached[occupied].max()) + PLAN_STEPS
        length = 1 << (max(longest, SHORTEST) - 1).bit_length()
        self._length = min(length, self._cache.num_positions)
        return np.arange(self._num_rows), occupied

    def compute(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        rows = self._input[:, : self._num_rows].numpy()
        rows[0], rows[1] = tokens, positions
        self._static.copy_(self._input, non_blocking=True)
        if self._graphs is None:
            return self._decode()
        shape = (self._num_rows, self._length)
        if shape not in self._replays:
            self._replays[shape] = self._graphs.record(self._decode)
        return self._replays[shape]()

    def forget(self) -> None:
        self._replays.clear()
        if self._graphs is not None:
            self._graphs.forget()

    def _decode(self) -> Tensor:
        """Logits [rows, vocab]; done twice, it writes the same keys and values twice."""
        tokens, positions = self._static[:, : self._num_rows]
        places = self._cache.next_places(positions)
        # Not cuDNN's kernels: they choose their plan on the host, at each new shape.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            mask = self._cache.mask(positions, self._length)
            return self._decoder.decode(tokens, positions, places, mask)


def padded_rows(num_rows: int, most: int) -> int:
    """`num_rows` rounded up to a power of two or one and a half of it, and at most to `most`."""
    power = 1 << (num_rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if power >= 4 and num_rows <= between else power, most)
