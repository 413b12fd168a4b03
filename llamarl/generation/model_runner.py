"""The decode step as each kind of device runs it best.

Owns: which rows a step computes, in which order, and how its kernels are started. Does not own: the
maths (`decoder.py`), drawing tokens, or rollouts (`running_batch.py`). Invariant: row i of the
logits is that of slot `slots[i]`.

On CPUs arithmetic is costly and calls are cheap: only rollouts are computed, the longest first. On
GPUs a step of a small batch costs as much as that of a large one, but each call costs: rows are
slots in order, padded to few sizes, so that a step is one of few shapes and each shape is captured
once as a CUDA graph. Results of the rows in between that hold no rollout are not used.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamarl.generation.cpu_kv_cache import PLAN_STEPS, CpuKVCache, PaddedRows
from llamarl.generation.cuda_kv_cache import CudaKVCache
from llamarl.generation.decoder import Decoder
from llamarl.generation.running_batch import RunningBatch

SHORTEST = 128  # the smallest length that padded rows read
Replay = Callable[[], Tensor]


class EagerRunner:
    """Launches every operation by itself, over rollouts alone.

    `keeps_addresses`: at a commit weights must be overwritten, not replaced.
    """

    keeps_addresses = False

    def __init__(self, decoder: Decoder, cache: CpuKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._plan: list[PaddedRows] = []
        self._slots = np.empty(0, np.int64)
        self._num_computed = 0  # since `arrange`

    def arrange(self, running: RunningBatch) -> tuple[np.ndarray, slice]:
        """For the next PLAN_STEPS steps: the slot of each row, and which rows are rollouts."""
        self._slots = running.by_length()
        self._plan = self._cache.plan(self._slots, running.cached[self._slots] + 1)
        self._num_computed = 0
        return self._slots, slice(None)

    def compute(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits float32 [n, vocab] after `tokens` int32 [n] at `positions` int64 [n]."""
        device = self._cache.device
        on_device = torch.from_numpy(positions).to(device)
        if self._num_computed:
            self._cache.lengthen(self._plan, on_device)
        self._num_computed += 1
        index = self._cache.write_index(self._slots, positions)
        ids = torch.from_numpy(tokens).to(device)
        return self._decoder.decode(ids, on_device, index, self._plan)

    def forget(self) -> None:
        """Drop what refers to addresses of weights or cache: nothing here."""


class CudaGraphs:
    """Graphs of one device that share one memory pool: only one of them may run at a time, and each
    replay overwrites the result of the one before.

    A replay reads and writes the addresses that the capture saw: call `forget` when they change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Run `compute` once, so that libraries initialise, then capture it. The replay returns
        what `compute` returned in the capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads process and compare weights meanwhile: let them allocate.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def forget(self) -> None:
        """Start a new pool: the old one's memory is freed with the last of its graphs."""
        self._pool = torch.cuda.graph_pool_handle()


class PaddedRunner:
    """Few shapes, each recorded by `graphs` when it first occurs; without `graphs` every operation
    is launched by itself."""

    def __init__(self, decoder: Decoder, cache: CudaKVCache, graphs: CudaGraphs | None) -> None:
        self.keeps_addresses = graphs is not None
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._num_rows = self._length = 0
        is_cuda = cache.device.type == "cuda"
        # Tokens and positions, in host memory and at the addresses that the graphs read.
        shape = (2, cache.num_slots)
        self._input = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._static = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def arrange(self, running: RunningBatch) -> tuple[np.ndarray, np.ndarray]:
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
        """Logits [rows, vocab]. Run twice, it writes the same keys and values twice."""
        tokens, positions = self._static[:, : self._num_rows]
        index = self._cache.next_index(positions)
        # Without cuDNN's kernels, which choose their plan on the host at each new shape.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            mask = self._cache.mask(positions, self._length)
            return self._decoder.decode(tokens, positions, index, mask)


ModelRunner = EagerRunner | PaddedRunner


def padded_rows(num_rows: int, most: int) -> int:
    """`num_rows` rounded up to a power of two or one and a half of it, and at most to `most`."""
    power = 1 << (num_rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if power >= 4 and num_rows <= between else power, most)
