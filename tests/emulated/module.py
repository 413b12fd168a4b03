"""torch's module of the emulated accelerator: streams and events, as `torch.cuda` has them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule

from tests.emulated.accelerator import counts, queue


class Event:
    """A point of the queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_launched = 0

    def record(self, stream: Any = None) -> None:
        self.num_launched = queue.num_launched

    def wait(self, stream: Any = None) -> None:
        """Streams run one after another here."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        is_idle = self.num_launched == queue.num_launched
        counts.add("wait for all" if is_idle else "wait while the device has more to do")
        queue.finish(self.num_launched)


class Stream:
    """All streams are one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        made = event or Event()
        made.record()
        return made

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts.add("wait for all")
        queue.finish(queue.num_launched)


class Module(_DummyBackendModule):  # type: ignore[misc]
    """torch's module of the device, as `torch.cuda` is of GPUs."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        Stream().synchronize()

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass
