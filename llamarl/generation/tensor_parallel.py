"""The process group inside the model: the tensor-parallel ranks of one replica.

What `sum` and `gather` return is equal on all ranks, bit for bit, so all of them sample the same
tokens.
"""

from datetime import timedelta

import torch
from torch import Tensor

from llamarl.models.process_group import JOIN, form_group, meet

LIMIT = timedelta(minutes=10)  # between two ranks within a step


class TensorParallelGroup:
    """`num_ranks` processes that meet at the file `rendezvous`, which no other group uses.

    gloo on CPUs, NCCL on GPUs. Waits for all; call it, and its methods, from the compute thread.
    """

    def __init__(self, rendezvous: str, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._is_cuda = device.type == "cuda"
        store = meet(rendezvous, rank, num_ranks, JOIN)
        self._group = form_group(device, store, rank, num_ranks, LIMIT)

    def sum(self, x: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place; returns it."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, columns: Tensor) -> Tensor:
        """Lay the ranks' columns [n, m] side by side: [n, m * num_ranks]."""
        num_rows, width = columns.shape
        parts = columns.new_empty(self.num_ranks * num_rows, width)
        self._group._allgather_base(parts, columns.contiguous()).wait()
        return parts.view(-1, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def close(self) -> None:
        """Leave the group; a rank that is still computing fails."""
        if self._is_cuda and self._group is not None:
            self._group.abort()
        self._group = None
