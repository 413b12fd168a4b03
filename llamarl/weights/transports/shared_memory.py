"""Shared memory of one host: segments that other processes can map and that die with their users.

Owns: opening a segment and its size, the name of this host. Does not own: what lies in a segment,
files in memory as such (`memory_file.py`). Invariant: nothing is left behind, whichever process is
killed and when.

A segment is a file in memory without a name (memfd). Other processes reach it as /proc/PID/fd/N of
the owner while the owner lives; the kernel frees it when the last process that maps it ends. So
there are no names to clean up, and the size of /dev/shm (64 MB in many containers) does not matter.
"""

import mmap
import os
import socket
import sys

import torch
from torch import Tensor

from llamarl.memory_file import HAS_MEMORY_FILES, reserved_file
from llamarl.weights.transports.available import available_bytes

HOST = "LLAMARL_HOST"  # environment variable: the address of this host's worker daemon


class Segment:
    """A zeroed segment `flat` (uint8 [num_bytes]) whose pages are all reserved now, so that no
    later write can fail. `path` is how other processes of this user on this host open it.

    `label` shows in /proc/PID/maps. ValueError if the host has too little memory.
    """

    def __init__(self, label: str, num_bytes: int) -> None:
        self._fd: int | None = reserved_file(label, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.flat = _map(self._fd, num_bytes)

    def close(self) -> None:
        """Stop others from opening it; the memory goes with the last tensor and mapping."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_segment(path: str, num_bytes: int) -> Tensor:
    """A segment of another process, uint8 [num_bytes]; its tensors keep it mapped. RuntimeError if
    it is gone or not of this size."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"shared memory {path} cannot be opened: {error}") from error
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes != num_bytes:
            raise RuntimeError(
                f"shared memory {path} must have {num_bytes} bytes, got {actual_bytes}"
            )
        return _map(fd, num_bytes)
    finally:
        os.close(fd)


def _map(fd: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def this_host() -> str:
    """The name of this machine in layouts and staging handles.

    The cluster sets it, so that two worker daemons on one machine count as two hosts.
    """
    return os.environ.get(HOST) or socket.gethostname()


def require_memory(purpose: str, num_bytes: int) -> None:
    """ValueError, with numbers, unless `num_bytes` more of shared memory fit on this host."""
    if not HAS_MEMORY_FILES:
        raise ValueError(f"weights=shared_memory must run on Linux, got {sys.platform}")
    free_bytes = available_bytes()
    if num_bytes > free_bytes:
        raise ValueError(
            f"{purpose} must fit into memory: needs {num_bytes} bytes, got {free_bytes} available"
        )
