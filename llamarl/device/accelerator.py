"""The platform of devices with memory and streams of their own, by torch's generic interface.

Owns: what is alike on all of them: the device module of torch gives their streams, events and
pinned memory. Does not own: graphs, shared memory and communicators, which each has its own way of.
Invariant: nothing here waits for the device but `synchronize` and an `Arrival`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llamarl.device.platform import Arrival, Platform, SideStream

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
    """See `Platform`."""

    runs_ahead = True
    has_wide_mm = True
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
        """The flash kernel alone does, which takes neither float32 nor a mask."""
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
