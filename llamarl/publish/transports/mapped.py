"""Memory that another process of this host can map, and writing straight into it."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.core.device.devices import platform_of
from llamarl.core.device.platform import Handle
from llamarl.core.errors import TargetLost
from llamarl.core.memory import HAS_MEMORY_FILES, available_bytes, reserved_file
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import Route, StagingHandle
from llamarl.publish.transports.messages import CopyCast, cut
from llamarl.publish.transports.routes import End

PIECE_BYTES = 1 << 26  # a copy reads this much before it checks whether its version is still there


class MappedBlock:
    """A flat tensor `flat` of zeros that other processes can map at `address`; `num_bytes` long.

    On the CPU, or with `is_host`, it is a memfd segment, which /proc/PID/maps shows as `label`: its
    pages are all reserved now, so that no later write can fail, and pinned for the device. Else it
    is memory of the device. Raises ValueError if there is too little."""

    def __init__(
        self, label: str, num_elements: int, dtype: torch.dtype, device: torch.device, is_host: bool
    ) -> None:
        self.num_bytes = num_elements * dtype.itemsize
        self._fd: int | None = None
        self._path = ""  # of a segment
        self._pinned: int | None = None
        self._handle: Handle | None = None
        self._platform = platform_of(device)
        if device.type != "cpu" and not is_host:
            try:
                self.flat = torch.zeros(num_elements, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"GPU memory for {label} must have {self.num_bytes} bytes, got: out of memory"
                ) from error
            return
        self._fd = reserved_file(label, self.num_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.flat = _map(self._fd, self.num_bytes).view(dtype)
        try:
            self._platform.pin(self.flat, label)
        except ValueError:
            self.close()
            raise
        self._pinned = self.flat.data_ptr()

    @property
    def address(self) -> str | tuple[str, Handle]:
        """The address by which other processes open it: a path, or the kind of device and its
        handle."""
        if self._path:
            return self._path
        if self._handle is None:
            self._handle = self._platform.share(self.flat)
        return self._platform.kind, self._handle

    @property
    def is_freed_by_offload(self) -> bool:
        """True if other processes must unmap it before it is offloaded: a GPU's memory. A segment
        gives up its pages under their mappings."""
        return not self._path

    def renew(self) -> None:
        """Make another handle at the next use: the memory may have been elsewhere meanwhile."""
        self._handle = None

    def close(self) -> None:
        """End the sharing; tensors handed out stay valid. It may be called twice."""
        if self._pinned is not None:
            self._platform.unpin(self._pinned)
            self._pinned = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def opened(address: object, num_bytes: int) -> Tensor:
    """Return a block of another process of this user on this host, uint8 [num_bytes]; its tensors
    keep it mapped. Raises RuntimeError if it is gone or not of this size."""
    if isinstance(address, tuple):
        kind, handle = address
        return platform_of(kind).map_shared(handle)[:num_bytes]
    assert isinstance(address, str), address
    try:
        fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"shared memory {address} cannot be opened: {error}") from error
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes != num_bytes:
            raise RuntimeError(
                f"shared memory {address} must have {num_bytes} bytes, got {actual_bytes}"
            )
        return _map(fd, num_bytes)
    finally:
        os.close(fd)


class MappedSender:
    """Writes strided slices straight into the targets' staging memory; see `TransportSender`."""

    def __init__(self, route: Route, end: End) -> None:
        self._host = end.host
        self._pieces = [
            piece
            for copy in route.each()
            for piece in cut(copy, PIECE_BYTES // getattr(torch, copy.target_dtype).itemsize)
        ]
        self._opened: dict[object, Tensor] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, handles: Mapping[int, StagingHandle], copy_cast: CopyCast) -> Fingerprints:
        devices, written = set(), Fingerprints()
        for copy in self._pieces:
            handle, dtype = handles[copy.target_rank], getattr(torch, copy.target_dtype)
            if handle.host != self._host:
                raise RuntimeError(
                    f"memory must be of host {self._host} to be mapped, got generator "
                    f"{handle.replica} rank {handle.rank} on {handle.host}"
                )
            with self._lock:  # so that nothing is written any more once `close` has returned
                flat = self._flat(handle, dtype)
                devices.add(flat.device)  # not the tensor: it would keep the mapping
                target = flat.as_strided(copy.shape, copy.target_strides, copy.target_offset)
                written.add(copy.name, copy_cast(copy, target))
                del flat, target
        for device in devices:
            platform_of(device).synchronize(device)
        with self._lock:  # all other memory stays mapped from write to write
            for handle in handles.values():
                if handle.may_be_freed:
                    self._opened.pop(handle.address, None)
        return written

    def close(self) -> None:
        self._is_closed = True  # the piece that is being written is the last one
        with self._lock:
            self._opened.clear()

    def _flat(self, handle: StagingHandle, dtype: torch.dtype) -> Tensor:
        """Return the staging memory, mapped once. Called with the lock held."""
        if self._is_closed:
            raise TargetLost(f"generator {handle.replica} was disconnected")
        if handle.address not in self._opened:
            try:
                self._opened[handle.address] = opened(handle.address, handle.num_bytes)
            except RuntimeError as error:
                raise TargetLost(
                    f"memory of generator {handle.replica} rank {handle.rank}: {error}"
                ) from error
        return self._opened[handle.address].view(dtype)


HOST = "LLAMARL_HOST"  # environment variable: the address of this host's worker daemon


def _map(fd: int, num_bytes: int) -> Tensor:
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def this_host() -> str:
    """Return the name of this machine in layouts and staging handles.

    The cluster sets it, so that two worker daemons on one machine count as two hosts."""
    return os.environ.get(HOST) or socket.gethostname()


def require_memory(purpose: str, num_bytes: int) -> None:
    """Raise ValueError, with numbers, unless `num_bytes` more of shared memory fit on this host."""
    if not HAS_MEMORY_FILES:
        raise ValueError(f"weights=shared_memory must run on Linux, got {sys.platform}")
    free_bytes = available_bytes()
    if num_bytes > free_bytes:
        raise ValueError(
            f"{purpose} must fit into memory: needs {num_bytes} bytes, got {free_bytes} available"
        )
