"""torch's module of the emulated accelerator: streams and events, as `torch.cuda` has them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule

from tests.emulated import streams
from tests.emulated.accelerator import counts, queue, random_numbers


class Event:
    """A point of a stream, and of the queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_launched = 0
        self.place = (0, 0)

    def record(self, stream: Stream | None = None) -> None:
        timeline = streams.current() if stream is None else stream.timeline
        self.num_launched = queue.num_launched
        self.place = timeline.number, timeline.num_launched

    def wait(self, stream: Stream | None = None) -> None:
        timeline = streams.current() if stream is None else stream.timeline
        streams.come_after(timeline, *self.place)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        is_idle = self.num_launched == queue.num_launched
        counts.add("wait for all" if is_idle else "wait while the device has more to do")
        queue.finish(self.num_launched)
        streams.host_waited(*self.place)


class Stream:
    """A stream; `timeline` is another one's if given."""

    def __init__(self, *args: Any, timeline: streams.Timeline | None = None, **kwargs: Any) -> None:
        self.timeline = streams.new_stream() if timeline is None else timeline
        self._before: list[streams.Timeline] = []

    def __enter__(self) -> Stream:
        self._before.append(streams.enter(self.timeline))
        return self

    def __exit__(self, *args: Any) -> None:
        streams.enter(self._before.pop())

    def wait_stream(self, stream: Stream) -> None:
        streams.come_after(self.timeline, stream.timeline.number, stream.timeline.num_launched)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        made = event or Event()
        made.record(self)
        return made

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts.add("wait for all")
        queue.finish(queue.num_launched)
        streams.host_waited(self.timeline.number, self.timeline.num_launched)


class Module(_DummyBackendModule):  # type: ignore[misc]
    """torch's module of the device, as `torch.cuda` is of GPUs."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(timeline=streams.current())

    def stream(self, stream: Stream) -> Stream:
        return Stream(timeline=stream.timeline)

    def synchronize(self, device: Any = None) -> None:
        self.current_stream().synchronize()

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return random_numbers.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        random_numbers.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        random_numbers.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False
