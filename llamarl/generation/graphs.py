"""CUDA graphs of decode steps.

Owns: capturing and replaying. Does not own: what is captured or when (`steps.py`). Invariant: a
replay reads and writes the addresses that the capture saw; who moves anything calls `forget`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], Tensor]


class CudaGraphs:
    """Graphs of one device that share one memory pool: only one of them may run at a time, and what
    a replay returned is overwritten by the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Capture `compute`, which must bear being run once before: libraries set themselves up
        then. The replay returns what it returned."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads prepare and compare weights meanwhile: let them allocate.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def forget(self) -> None:
        """Begin a new pool: the old one's memory is freed with the last of its graphs."""
        self._pool = torch.cuda.graph_pool_handle()
