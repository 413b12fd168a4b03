"""The interface to torch's devices of one kind, and the platform of devices with memory and streams
of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Handle = tuple[object, ...]
"""The numbers and bytes that another process needs to map a device's memory."""

Replay = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device: `uuid` tells it from all others, "" for a CPU."""

    name: str
    memory_bytes: int
    uuid: str


class Arrival:
    """A tensor on its way to host memory."""

    def __init__(self, host: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._host, self._wait = host, wait

    def wait(self) -> Tensor:
        """Return the tensor, once it is there."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._host


class Graphs(Protocol):
    """Records sequences of operations once and launches each as one."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Run `compute` and record it; the returned call runs it again, on the same addresses."""

    def forget(self) -> None:
        """Free what was recorded, since the addresses change."""


class SideStream:
    """A stream for work beside the computation; in this class the work is done at once."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run everything that the block launches, on whichever thread, on this stream, where it
        waits for nothing that others have launched (see `Platform.mark`)."""
        yield

    @contextmanager
    def after_computing(self, reads: Tensor) -> Iterator[None]:
        """Run everything that the block launches on this stream, after what this thread has
        computed so far; it uses the memory of `reads`."""
        yield

    def mark(self) -> Callable[[], None]:
        """Mark the point that the stream has come to. After a call of the result, the computation
        goes on only when all before that point is done."""
        return lambda: None


class Platform:
    """Uses the devices of one kind; this class uses CPUs.

    `runs_ahead`: the host launches operations and goes on while they run, so whatever needs a
    result waits. `backend` is that of the default process group of its ranks, `host_backend` that
    of groups for tensors in host memory. `num_logits` is the number of elements that the head works
    on at once, `num_tiled` that of code which quantises or multiplies with quantised matrices;
    `tile_bytes` is what a publish copies at once, `summed_bytes` what it only sums at once,
    `max_sums` the number of segment sums that it keeps until they are multiplied, for each set of
    keys. `has_wide_mm`: products of 16-bit matrices may give float32. `has_grouped_mm`: one
    operation multiplies consecutive rows with different matrices.
    """

    kind = "cpu"
    backend = host_backend = "gloo"
    runs_ahead = False
    has_wide_mm = False
    has_grouped_mm = False
    num_logits = 2**24  # 64 MiB in float32
    num_tiled = 1 << 19  # fits the second-level cache of a core
    tile_bytes = 1 << 19  # stays in a core's cache while it is cast, copied and summed
    summed_bytes = 1 << 19
    max_sums = 1 << 13

    def find(self, field: str, index: int) -> torch.device:
        """Return the device of this kind with this index, which this process may use. ValueError,
        naming the config's `field`, if there is none."""
        return torch.device(self.kind)

    def use(self, device: torch.device) -> None:
        """Make it this thread's device, for libraries that ignore the device of tensors."""

    def card(self, device: torch.device) -> Card:
        return Card(name=self.kind, memory_bytes=0, uuid="")

    def synchronize(self, device: torch.device) -> None:
        """Return when everything that this thread has launched is done."""

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of the random number generator of `device`: uint8, in host memory."""
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Set the state of the generator to one that `random_state` returned."""
        torch.set_rng_state(state)

    def free_cached(self) -> None:
        """Free memory that torch's allocator keeps, for other processes."""

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned host memory, which the device copies from and to without waiting."""
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return tensors of the host on `device`, in one copy that is not waited for."""
        return list(tensors)

    def fetch(self, tensor: Tensor) -> Arrival:
        """Begin to copy a tensor of the device to the host."""
        return Arrival(tensor)

    def side_stream(self, device: torch.device) -> SideStream:
        """Return a stream beside the computation's. Whatever waits for an operation waits for all
        that was launched on its stream before: on the stream of a computation that runs ahead, that
        would be its whole queue."""
        return SideStream()

    def mark(self, device: torch.device) -> Callable[[], None]:
        """Mark the point that this thread's stream has come to. After a call of the result on any
        thread, that thread's stream goes on only when all before that point is done."""
        return lambda: None

    def graphs(self, device: torch.device) -> Graphs | None:
        """Return the recorder of graphs on `device`; None where operations cannot be recorded."""
        return None

    def has_triton(self, device: torch.device) -> bool:
        """Return whether kernels written in Triton run there."""
        return False

    def has_grouped_attention(self, dtype: torch.dtype, *, is_masked: bool) -> bool:
        """Return whether fused attention of this dtype, with or without an explicit mask, lets
        several query heads share a key head. Where none does, torch computes with all scores in
        memory."""
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
        """Form a process group beside the default one, over this network interface.

        `timeout` limits each collective or message. With `fails_alone`, an error makes only the
        group unusable, not the process. A rank's messages may go one by one, in the order in which
        they are begun.
        """
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, num_ranks, gloo)

    def pin(self, flat: Tensor, label: str) -> None:
        """Let the device copy from and to this host memory without waiting. ValueError, naming
        `label`, if there is too little that can be pinned."""

    def unpin(self, address: int) -> None:
        """End what `pin` began for the memory at `address`."""

    def share(self, flat: Tensor) -> Handle:
        """Return a handle by which any number of processes of this host may map the memory, any
        number of times. The owner decides when it is freed."""
        raise RuntimeError(f"memory of a {self.kind} must be shared as a segment")

    def map_shared(self, handle: Handle) -> Tensor:
        """Return the memory of a handle, uint8; its tensors keep it mapped. RuntimeError if it is
        gone."""
        raise RuntimeError(f"memory of a {self.kind} must be shared as a segment")


ALIGN_BYTES = 16  # of each tensor within a copy: the largest element, and what kernels read at once


class OwnStream(SideStream):
    """A stream beside the one that this thread computes on."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._computing = module.current_stream(device)
        self._copying = module.Stream(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._module.stream(self._copying):
            yield

    @contextmanager
    def after_computing(self, reads: Tensor) -> Iterator[None]:
        self._copying.wait_stream(self._computing)
        reads.record_stream(self._copying)
        with self._module.stream(self._copying):
            yield

    def mark(self) -> Callable[[], None]:
        event = self._copying.record_event()
        return lambda: self._computing.wait_event(event)


class Accelerator(Platform):
    """The platform of devices with memory and streams of their own; see `Platform`."""

    runs_ahead = True
    has_wide_mm = True
    has_grouped_mm = True
    num_logits = 2**27  # 512 MiB: each chunk reads the whole head
    num_tiled = 1 << 24  # 32 MiB fit a GPU's second-level cache
    tile_bytes = 1 << 24  # a kernel launch costs as much as 30 MB of reading
    summed_bytes = 1 << 28  # which gains nothing from a cache
    max_sums = 1 << 17  # of 400 MB

    @property
    def module(self) -> Any:
        """torch's module of the device, such as `torch.cuda`."""
        return torch.get_device_module(self.kind)

    def has_grouped_attention(self, dtype: torch.dtype, *, is_masked: bool) -> bool:
        """See `Platform`. Only the flash kernel does, which takes neither float32 nor a mask."""
        return dtype in (torch.bfloat16, torch.float16) and not is_masked

    def use(self, device: torch.device) -> None:
        self.module.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        # Not the whole device: that would break a capture that another thread is making.
        self.module.current_stream(device).synchronize()

    def random_state(self, device: torch.device) -> Tensor:
        state: Tensor = self.module.get_rng_state(device)
        return state

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        self.module.set_rng_state(state, device)

    def free_cached(self) -> None:
        self.module.empty_cache()

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def send(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        if not tensors:
            return []
        # torch's allocator of pinned memory hands it out again only when the copy is done.
        sizes = [-(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for tensor in tensors]
        host = self.empty_host([sum(sizes)], torch.uint8)
        for tensor, part in zip(tensors, host.split(sizes), strict=True):
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        parts = host.to(device, non_blocking=True).split(sizes)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, parts, strict=True)
        ]

    def fetch(self, tensor: Tensor) -> Arrival:
        host = self.empty_host(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        event = self.module.Event()
        event.record(self.module.current_stream(tensor.device))
        return Arrival(host, event.synchronize)

    def side_stream(self, device: torch.device) -> SideStream:
        return OwnStream(self.module, device)

    def mark(self, device: torch.device) -> Callable[[], None]:
        event = self.module.current_stream(device).record_event()
        return lambda: self.module.current_stream(device).wait_event(event)
