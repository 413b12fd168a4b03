"""The platform of NVIDIA GPUs.

Only calls that use a device bring a CUDA context up."""

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from subprocess import CalledProcessError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.core.device.names import GPU, VERSION_FILE, VISIBLE
from llamarl.core.device.platform import Accelerator, Card, Handle, Replay

OLDEST_DRIVER = {"12": "525", "13": "580"}  # by CUDA's major version
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is formed
CLEAN_UP_ONLY = "2"
CONNECTING_S = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # read when the process first connects a group
OLDEST_FOR_TRITON = (8, 0)  # compute capability: older ones have no bfloat16

log = logging.getLogger(__name__)
_forming = threading.Lock()  # all threads share the environment


class CudaGraphs:
    """Records graphs of one device that share one memory pool: only one of them may run at a time,
    and each replay overwrites the result of the one before.

    A replay reads and writes the addresses that the capture saw: call `forget` when they change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """See `Graphs`. `compute` runs once before the capture, which sets up what libraries
        allocate."""
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


class CudaPlatform(Accelerator):
    """See `Platform`."""

    kind = GPU
    backend = "cpu:gloo,cuda:nccl"  # tensors of the host may be gathered too

    def find(self, field: str, index: int) -> torch.device:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_gpus == 0:
            driver = VERSION_FILE.read_text() if VERSION_FILE.exists() else ""
            reason = why_no_gpu(torch.__version__, torch.version.cuda, driver)
            raise ValueError(f"{field} must be cpu {reason}, got {self.kind!r}")
        if index >= num_gpus:
            raise ValueError(
                f"cluster.num_gpus_per_host must be at most the {num_gpus} GPUs of "
                f"{socket.gethostname()}, got a rank for number {index}"
            )
        return torch.device(self.kind, index)

    def card(self, device: torch.device) -> Card:
        properties = torch.cuda.get_device_properties(device)
        return Card(
            name=properties.name,
            memory_bytes=properties.total_memory,
            uuid=str(properties.uuid),
        )

    def graphs(self, device: torch.device) -> CudaGraphs:
        return CudaGraphs(device)

    def has_triton(self, device: torch.device) -> bool:
        """Return whether Triton works: torch for CUDA brings it, but it needs a C compiler and
        Python's headers too."""
        if torch.cuda.get_device_capability(device) < OLDEST_FOR_TRITON:
            return False
        try:
            from triton.runtime import driver

            driver.active.get_current_device()  # the first use compiles Triton's launcher
        except (RuntimeError, AssertionError, OSError, ImportError, CalledProcessError) as error:
            log.warning("torch's attention decodes, as Triton cannot be set up: %s", error)
            return False
        return True

    def make_group(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        interface: str,
        fails_alone: bool = False,
    ) -> Any:
        """See `Platform`. A group that fails alone connects here, over this thread's device, and
        waits for its other ranks: RuntimeError if one does not come within the `timeout` of the
        first such group of the process. Then all messages go over its one communicator; otherwise
        torch would make one for each pair of ranks, with buffers of its own (pytorch#129140)."""
        os.environ["NCCL_SOCKET_IFNAME"] = interface
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        if not fails_alone:
            return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        options.config.blocking = 0  # a call that connects would wait for a rank that died for ever
        os.environ.setdefault(CONNECTING_S, str(ceil(timeout.total_seconds())))
        with formed_to_fail_alone():
            group = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        group.eager_connect_single_device(torch.device(self.kind, torch.cuda.current_device()))
        group._comm_ptr()  # type: ignore[attr-defined]  # waits until it is connected
        return group

    def pin(self, flat: Tensor, label: str) -> None:
        status = torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)
        if int(status) != 0:
            raise ValueError(f"{label} must fit into pinned memory, got CUDA error {status}")

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def share(self, flat: Tensor) -> Handle:
        """See `Platform`. torch expects exactly one opening: until it is closed, and for ever after
        a second one, it keeps the memory from being freed. Here the owner decides when it is freed,
        so the count is released and the handle names a counter that does not exist, which torch
        ignores.

        The opener has no event to wait for either: a weight buffer is synchronised when it is
        prepared. With an event, each opening would make one and never destroy it.
        """
        device, memory, num_bytes, offset, counter, place, event, _ = (
            flat.untyped_storage()._share_cuda_()
        )
        torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
        return device, memory, num_bytes, offset, b"/uncounted", 0, event, False

    def map_shared(self, handle: Handle) -> Tensor:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def formed_to_fail_alone() -> Iterator[None]:
    """Let NCCL groups formed in this block only clean up after an error, such as a rank that died.

    By default torch ends the process. That is right for the ranks of one model, whose numbers would
    be garbage, and wrong for a trainer that sends weights to a replica that is gone.
    """
    with _forming:
        before = os.environ.get(ERROR_HANDLING)
        os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[ERROR_HANDLING]
            else:
                os.environ[ERROR_HANDLING] = before


def why_no_gpu(torch_version: str, cuda: str | None, driver_text: str) -> str:
    """Return why torch, built for this version of `cuda`, finds no GPU: the words after "must be
    cpu".

    `driver_text` is the content of VERSION_FILE, "" without a driver.
    """
    found = re.search(r"\d+\.\d+(\.\d+)?", driver_text)
    if found is None:
        return "on a machine without a GPU"
    if cuda is None:
        return f"with torch {torch_version}, which is built without CUDA"
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0], "")
    if oldest and int(found[0].partition(".")[0]) < int(oldest):
        return f"with NVIDIA driver {found[0]} (torch's CUDA {cuda} needs {oldest} or newer)"
    shown = os.environ.get(VISIBLE, "unset")
    return (
        f"where torch finds no GPU (its CUDA is {cuda}, NVIDIA driver {found[0]}, "
        f"{VISIBLE} {shown or 'empty'})"
    )
