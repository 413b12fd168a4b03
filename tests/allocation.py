"""What a process holds, and what a piece of torch code allocates and calls."""

from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest new storage, and every operation by name."""

    def __init__(self):
        super().__init__()
        self.num_bytes, self.names = 0, set()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch imports its compiler to skip it, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


def resident_bytes():
    """Private and shared memory of this process, file pages left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return 1024 * sum(map(int, found))
