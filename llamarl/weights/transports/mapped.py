"""Memory that another process of this host can map, and writing straight into it.

Owns: allocating and opening such memory on the CPU (memfd) and on CUDA devices (CUDA IPC), and the
sender over it. Does not own: what lies in it. Invariant: an address says by itself how to open it,
so one sender serves both, and host memory may be the staging memory of a GPU.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.errors import TargetLost
from llamarl.weights.layout.boxes import Route, StagingHandle
from llamarl.weights.transports.ends import CopyCast
from llamarl.weights.transports.packed import cut
from llamarl.weights.transports.registry import End
from llamarl.weights.transports.shared_memory import Segment, open_segment

PIECE_BYTES = 1 << 26  # a copy reads this much before it checks whether its version is still there

CudaHandle = tuple[object, ...]
"""What torch needs to open CUDA memory of another process: numbers and bytes."""


class MappedBlock:
    """A flat tensor `flat` that others can map at `address`; `num_bytes` long.

    On the CPU a memfd segment; pinned if `device` is CUDA and `is_host`. Else memory of the device.
    ValueError if there is too little.
    """

    def __init__(
        self, label: str, num_elements: int, dtype: torch.dtype, device: torch.device, is_host: bool
    ) -> None:
        self.num_bytes = num_elements * dtype.itemsize
        self._segment: Segment | None = None
        self._pinned: int | None = None
        self._handle: CudaHandle | None = None
        if device.type == "cuda" and not is_host:
            try:
                self.flat = torch.zeros(num_elements, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"GPU memory for {label} must have {self.num_bytes} bytes, got: out of memory"
                ) from error
            return
        self._segment = Segment(label, self.num_bytes)
        self.flat = self._segment.flat.view(dtype)
        if device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), self.num_bytes, 0)
            if int(status) != 0:
                self._segment.close()
                raise ValueError(f"{label} must fit into pinned memory, got CUDA error {status}")
            self._pinned = self.flat.data_ptr()

    @property
    def address(self) -> str | CudaHandle:
        """How other processes open it: a path, or a CUDA handle."""
        if self._segment is not None:
            return self._segment.path
        if self._handle is None:
            self._handle = _share(self.flat)
        return self._handle

    @property
    def is_freed_by_offload(self) -> bool:
        """True if other processes must unmap it before it is offloaded: a GPU's memory. A segment
        gives up its pages under their mappings."""
        return self._segment is None

    def renew(self) -> None:
        """Make another handle at the next use: the memory may have been elsewhere meanwhile."""
        self._handle = None

    def close(self) -> None:
        """End the sharing; tensors handed out stay valid. May be called twice."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        if self._segment is not None:
            self._segment.close()


def _share(flat: Tensor) -> CudaHandle:
    """A handle of CUDA memory that any number of processes may open, any number of times.

    torch expects exactly one opening: until it is closed, and for ever after a second one, it keeps
    the memory from being freed. Here the owner decides when it is freed, so the count is released
    and the handle names a counter that does not exist, which torch ignores.

    The opener has no event to wait for either: a weight buffer is synchronised when it is prepared.
    With an event, each opening would make one and never destroy it.
    """
    device, memory, num_bytes, offset, counter, place, event, _ = (
        flat.untyped_storage()._share_cuda_()
    )
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
    return device, memory, num_bytes, offset, b"/uncounted", 0, event, False


def opened(address: object, num_bytes: int) -> Tensor:
    """A block of another process, uint8 [num_bytes]; its tensors keep it mapped. RuntimeError if it
    is gone."""
    if isinstance(address, str):
        return open_segment(address, num_bytes)
    assert isinstance(address, tuple), address
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*address)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)[:num_bytes]


class MappedSender:
    """Writes strided slices straight into the targets' staging memory; see `TransportSender`."""

    def __init__(self, route: Route, end: End) -> None:
        self._host = end.host
        self._pieces = [
            [
                piece
                for copy in copies
                for piece in cut(copy, PIECE_BYTES // getattr(torch, copy.target_dtype).itemsize)
            ]
            for copies in route.by_bucket()
        ]
        self._opened: dict[object, Tensor] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, bucket: int, handles: Mapping[int, StagingHandle], copy_cast: CopyCast) -> None:
        devices = set()
        for copy in self._pieces[bucket]:
            handle, dtype = handles[copy.target_rank], getattr(torch, copy.target_dtype)
            if handle.host != self._host:
                raise RuntimeError(
                    f"memory must be of host {self._host} to be mapped, got generator "
                    f"{handle.replica} rank {handle.rank} on {handle.host}"
                )
            with self._lock:  # so that nothing is written any more once `close` has returned
                flat = self._flat(handle, dtype)
                devices.add(flat.device)  # not the tensor: it would keep the mapping
                copy_cast(
                    copy, flat.as_strided(copy.shape, copy.target_strides, copy.target_offset)
                )
                del flat
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        with self._lock:  # all other memory stays mapped from write to write
            for handle in handles.values():
                if handle.may_be_freed:
                    self._opened.pop(handle.address, None)

    def close(self) -> None:
        self._is_closed = True  # the piece that is being written is the last one
        with self._lock:
            self._opened.clear()

    def _flat(self, handle: StagingHandle, dtype: torch.dtype) -> Tensor:
        """The staging memory, mapped once; called with the lock held."""
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
