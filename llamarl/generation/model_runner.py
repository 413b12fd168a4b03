"""The decode step as each kind of device runs it best.

Owns: which rows a step computes, in which order, how its kernels are started and when the host
reads what they wrote. Does not own: the maths (`decoder.py`, `sampling.py`) or rollouts
(`running_batch.py`). Invariant: what a step writes is the same on all kinds of device, up to
rounding.

On CPUs arithmetic is costly and calls are cheap: only rollouts are computed, the longest first. On
GPUs a step of a small batch costs as much as that of a large one, but each call costs: rows are
slots in order, padded to few sizes, so that a step is one of few shapes and each shape is captured
once as a graph. Results of the rows in between that hold no rollout are not used.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from llamarl.device.devices import platform_of
from llamarl.device.platform import Graphs, Replay
from llamarl.generation.cpu_kv_cache import PLAN_STEPS, CpuKVCache, PaddedRows
from llamarl.generation.decoder import Decoder
from llamarl.generation.padded_kv_cache import PaddedKVCache
from llamarl.generation.running_batch import DecodeStep, RunningBatch
from llamarl.generation.sampling import sample


class EagerRunner:
    """Launches every operation by itself, over rollouts alone.

    `keeps_addresses`: at a commit weights must be overwritten, not replaced. `num_ahead`: steps
    that may be under way while another one is launched.
    """

    keeps_addresses = False
    num_ahead = 0

    def __init__(self, decoder: Decoder, cache: CpuKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._plan: list[PaddedRows] = []
        self._slots = np.empty(0, np.int64)
        self._num_computed = 0  # since `arrange`

    def arrange(self, running: RunningBatch) -> None:
        """Prepare rows and sampling parameters for the next PLAN_STEPS steps."""
        self._slots = running.by_length()
        self._plan = self._cache.plan(self._slots, running.cached[self._slots] + 1)
        self._sampling = running.sampling_rows(self._slots)
        self._num_computed = 0

    def launch(self, running: RunningBatch, version: int) -> DecodeStep:
        """One step of all rollouts."""
        slots = self._slots
        positions = running.cached[slots]
        uniform = torch.from_numpy(running.uniform[slots, positions + 1])
        logits = self.compute(running.sequence[slots, positions], positions)
        ids, logprobs = sample(logits, self._sampling, uniform.unsqueeze(1))
        running.in_flight[slots] += 1
        return DecodeStep(
            slots, running.num_released[slots], version, lambda: (ids.numpy(), logprobs.numpy())
        )

    def compute(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits float32 [n, vocab] after `tokens` int32 [n] at `positions` int64 [n]."""
        places = torch.from_numpy(positions)
        if self._num_computed:
            self._cache.lengthen(self._plan, places)
        self._num_computed += 1
        index = self._cache.write_index(self._slots, positions)
        return self._decoder.decode(torch.from_numpy(tokens), places, index, self._plan)

    def forget(self) -> None:
        """Drop what refers to addresses of weights or cache: nothing here."""


class PaddedRunner:
    """Few shapes, each recorded by `graphs` when it first occurs; without `graphs` every operation
    is launched by itself.

    A step needs nothing of the step before from the host: tokens that only the device has yet are
    taken from there. So one step may be under way while the next is launched, and the host's work
    on a step overlaps the next one.
    """

    num_ahead = 1

    def __init__(self, decoder: Decoder, cache: PaddedKVCache, graphs: Graphs | None) -> None:
        self.keeps_addresses = graphs is not None
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._platform = platform_of(cache.device)
        self._num_rows = self._length = 0
        # Five rows of slots: positions, tokens of the host, whether these count, random numbers (as
        # float64), lengths to attend to. In host memory once for each step that may be under way,
        # and at the address that the graphs read.
        shape = (5, cache.num_slots)
        self._inputs = deque(
            self._platform.empty_host(shape, torch.int64) for _ in range(1 + self.num_ahead)
        )
        for each in self._inputs:
            each.numpy().fill(0)
        self._static = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._newest = torch.zeros(cache.num_slots, dtype=torch.int64, device=cache.device)
        self._replays: dict[tuple[int, int], Replay] = {}

    def arrange(self, running: RunningBatch) -> None:
        """See `EagerRunner.arrange`."""
        occupied = np.flatnonzero(running.occupied)
        if not len(occupied):
            return
        self._num_rows = padded_rows(int(occupied[-1]) + 1, self._cache.num_slots)
        longest = int((running.cached + running.in_flight)[occupied].max()) + PLAN_STEPS
        self._length = self._cache.bucket(longest)
        self._sampling = running.sampling_rows(np.arange(self._num_rows))

    def launch(self, running: RunningBatch, version: int) -> DecodeStep:
        """See `EagerRunner.launch`."""
        rows = np.arange(self._num_rows)
        slots = rows[running.occupied[rows]]
        self._inputs.rotate()
        self._static.copy_(self._fill(running, rows), non_blocking=True)
        uniform = self._static[3, : self._num_rows].view(torch.float64).float()
        ids, logprobs = sample(self._compute(), self._sampling, uniform.unsqueeze(1))
        self._newest[: self._num_rows] = ids
        written = self._platform.fetch(torch.stack([ids.int(), logprobs.view(torch.int32)]))
        running.in_flight[slots] += 1

        def read() -> tuple[np.ndarray, np.ndarray]:
            found = written.wait().numpy()[:, slots]
            return found[0], found[1].view(np.float32)

        return DecodeStep(slots, running.num_released[slots], version, read)

    def forget(self) -> None:
        self._replays.clear()
        if self._graphs is not None:
            self._graphs.forget()

    def _fill(self, running: RunningBatch, rows: np.ndarray) -> Tensor:
        """The host's part of a step. A rollout that will turn out to have ended at its last
        position is computed there once more. A row without a rollout reads one position only."""
        last = running.sequence.shape[1] - 1
        is_known = running.in_flight[rows] == 0
        positions = np.minimum(running.cached[rows] + running.in_flight[rows], last)
        filled = self._inputs[0].numpy()[:, : len(rows)]
        filled[0], filled[1] = positions, running.sequence[rows, positions]
        filled[2], filled[4] = is_known, np.where(running.occupied[rows], positions + 1, 1)
        filled[3].view(np.float64)[:] = running.uniform[rows, np.minimum(positions + 1, last)]
        return self._inputs[0]

    def _compute(self) -> Tensor:
        """Logits float32 [rows, vocab]."""
        if self._graphs is None:
            return self._decode()
        shape = (self._num_rows, self._length)
        if shape not in self._replays:
            self._replays[shape] = self._graphs.record(self._decode)
        return self._replays[shape]()

    def _decode(self) -> Tensor:
        """The same. Run twice, it writes the same keys and values twice."""
        positions, known, is_known, _, lengths = self._static[:, : self._num_rows]
        tokens = torch.where(is_known > 0, known, self._newest[: self._num_rows])
        index = self._cache.next_index(positions)
        plan = self._cache.plan(lengths, self._length)
        return self._decoder.decode(tokens, positions, index, plan)


ModelRunner = EagerRunner | PaddedRunner


def padded_rows(num_rows: int, most: int) -> int:
    """`num_rows` rounded up to a power of two or one and a half of it, and at most to `most`."""
    power = 1 << (num_rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if power >= 4 and num_rows <= between else power, most)
