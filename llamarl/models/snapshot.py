"""The files of a checkpoint's tensors, and a copy of these to write them from while training.

Owns: what a rank writes into a checkpoint's folder, its part of the manifest included, and the
copy in host memory. Does not own: which tensors a checkpoint holds (`policy.py`), when it is
committed (`checkpoints/`). Invariant: writing uses a process group of its own, so its collectives
may run beside those of training; the copy changes in `take` only.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from llamarl.checkpoints import manifest
from llamarl.device.devices import platform_of
from llamarl.models import hf

WRITE_LIMIT = timedelta(days=1)  # the fastest rank waits so long for the slowest one
LARGEST_SHARE = 0.5  # of a host's available memory that copies may take: others grow too


class Snapshot:
    """One rank's part of a checkpoint; made by all ranks of the default group at once.

    The copy's memory is allocated by the first `take` and kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._platform = device, platform_of(device)
        backend = self._platform.host_backend
        self._group = dist.new_group(backend=backend, timeout=WRITE_LIMIT)
        self._copies: dict[str, torch.Tensor] = {}

    def take(
        self, state: dict[str, torch.Tensor], host: str, available_bytes: Callable[[], int]
    ) -> bool:
        """Copy `state` into host memory; False, on all ranks, if one of their hosts has too little
        for the copies of its ranks. `host` names this rank's."""
        if not self._copies:
            if not self._is_room(state, host, available_bytes()):
                return False
            self._copies = {
                name: torch.empty_like(tensor, device="cpu", pin_memory=self._platform.runs_ahead)
                for name, tensor in state.items()
            }
        for name, copy in self._copies.items():
            _local(copy).copy_(_local(state[name]), non_blocking=True)
        self._platform.synchronize(self._device)
        return True

    def write_copy(self, folder: str) -> None:
        """Write what was copied last; on any thread, but not twice at a time. Raises as `write`."""
        self.write(folder, self._copies)

    def write(self, folder: str, state: dict[str, torch.Tensor]) -> None:
        """Write `state` into `folder`, each rank its shards and its part of the manifest.

        OSError if the disk is full: before anything is written, unless it fills up meanwhile.
        RuntimeError for any other failure.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        hf.check_space(folder, num_bytes, "a checkpoint needs")
        try:
            dcp.save(state, checkpoint_id=folder, process_group=self._group)
        except CheckpointException as error:  # a BaseException with the failures of all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            # On a disk that fills up meanwhile torch's zip writer hides the reason: free space.
            free_bytes = shutil.disk_usage(folder).free
            message = (
                f"checkpoint could not be written by rank {rank}: {cause} ({free_bytes} bytes are "
                f"free in {folder})"
            )
            if isinstance(cause, OSError):
                raise OSError(cause.errno, message) from error
            raise RuntimeError(message) from error
        rank = dist.get_rank()
        manifest.write_part(Path(folder), rank, Path(folder).glob(f"__{rank}_*"))

    def _is_room(self, state: dict[str, torch.Tensor], host: str, available_bytes: int) -> bool:
        own = host, sum(_local(tensor).nbytes for tensor in state.values()), available_bytes
        answers = [own] * dist.get_world_size()
        dist.all_gather_object(answers, own, self._group)
        needed, room = defaultdict[str, int](int), dict[str, int]()
        for name, num_bytes, free_bytes in answers:
            needed[name] += num_bytes
            room[name] = min(room.get(name, free_bytes), free_bytes)
        return all(needed[name] <= LARGEST_SHARE * room[name] for name in needed)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
