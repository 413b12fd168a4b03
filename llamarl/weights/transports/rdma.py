"""The rdma transport: the source writes messages into an inbox of the target, one-sided.

Owns: inboxes, and both ends over them. Does not own: how a message gets there (`cluster/rdma.py`)
or what is in it (`packed.py`). Invariant: a message has its own place in the inbox of its source
rank, so sources need no answer from the target while they write; inboxes are host memory as large
as the largest bucket.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llamarl.errors import TargetLost
from llamarl.weights.layout.boxes import Copy, Route, StagingHandle
from llamarl.weights.transports.packed import (
    ALIGN_BYTES,
    Message,
    in_turns,
    messages_by,
    messages_to,
    source_ranks,
    unpack,
)
from llamarl.weights.transports.protocol import CopyCast, Rdma
from llamarl.weights.transports.shared_memory import require_memory
from llamarl.weights.transports.table import End


class RdmaSender:
    """Writes messages to the targets in turns, one write at a time; see `TransportSender`."""

    def __init__(self, route: Route, end: End) -> None:
        self._route, self._rank, self._timeout_s = route, end.rank, end.timeout_s
        self._rdma = require_rdma(end)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_closed = False

    def write(
        self, copies: Sequence[Copy], handles: Mapping[int, StagingHandle], copy_cast: CopyCast
    ) -> None:
        by_rank = messages_by("target_rank", copies, self._route.bucket_bytes)
        for rank, index, message in in_turns(by_rank):
            address = handles[rank].address
            assert isinstance(address, dict), "an rdma handle has addresses by source rank"
            if self._memory.numel() < message.num_bytes:
                self._memory = torch.empty(message.num_bytes, dtype=torch.uint8)
            for copy, values in message.each(self._memory):
                copy_cast(copy, values)
            if self._is_closed:
                raise TargetLost(f"generator {self._route.replica} was disconnected")
            handle, ready = address[self._rank][index], self._memory[: message.num_bytes]
            try:
                self._rdma.write(handle, ready, self._timeout_s)
            except (RuntimeError, TimeoutError, OSError) as error:
                raise TargetLost(
                    f"generator {self._route.replica} rank {rank} is out of reach: {error}"
                ) from error

    def close(self) -> None:
        self._is_closed = True


class RdmaReceiver:
    """Inboxes of one target rank, taken apart when it verifies; see `TransportReceiver`."""

    def __init__(self, route: Route, end: End, buckets: Sequence[Sequence[str]]) -> None:
        self._rdma, rank = require_rdma(end), end.rank
        self._flat = torch.empty(0)  # what is open
        self._messages = [messages_to(route, rank, names) for names in buckets]
        sizes = {
            source: max(_end(each.get(source, [])) for each in self._messages)
            for source in source_ranks(route)
        }
        require_memory(f"inboxes of generator {route.replica} rank {rank}", sum(sizes.values()))
        self._inboxes = {
            source: torch.zeros(num_bytes, dtype=torch.uint8) for source, num_bytes in sizes.items()
        }
        self._handles: dict[tuple[int, int, int], object] = {}

    def open(self, version: int, bucket: int, flat: Tensor) -> object:
        self._flat = flat
        return {
            source: [self._handle(source, *place) for place in _places(made)]
            for source, made in self._messages[bucket].items()
        }

    def arrive(self, version: int, bucket: int) -> None:
        for source, made in self._messages[bucket].items():
            for message, (begin, end) in zip(made, _places(made), strict=True):
                unpack(message, self._inboxes[source][begin:end], self._flat)
        if self._flat.is_cuda:
            torch.cuda.current_stream(self._flat.device).synchronize()

    def abort(self) -> None:
        return  # the inboxes are overwritten by the next bucket

    def close(self) -> None:
        for handle in self._handles.values():
            self._rdma.forget(handle)
        self._handles.clear()

    def _handle(self, source: int, begin: int, end: int) -> object:
        place = (source, begin, end)
        if place not in self._handles:
            self._handles[place] = self._rdma.register(self._inboxes[source][begin:end])
        return self._handles[place]


def require_rdma(end: End) -> Rdma:
    """What the ends write through; ValueError without it."""
    if end.rdma is None:
        raise ValueError("weights.transport must not be rdma without Monarch")
    return end.rdma


def _places(made: Sequence[Message]) -> list[tuple[int, int]]:
    """Where each message lies in the inbox: (begin, end) in bytes."""
    places, end = [], 0
    for message in made:
        begin = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        end = begin + message.num_bytes
        places.append((begin, end))
    return places


def _end(made: Sequence[Message]) -> int:
    return _places(made)[-1][1] if made else 0
