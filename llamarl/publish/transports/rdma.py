"""The rdma transport: the source writes messages into an inbox of the target, one-sided.

Each message of a bucket has an inbox of its own, so sources need no answer from the target while
they write; inboxes are host memory, and the next bucket's messages go into the same ones."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from llamarl.core.device.devices import platform_of
from llamarl.core.errors import TargetLost
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import Route, StagingHandle
from llamarl.publish.transports.mapped import require_memory
from llamarl.publish.transports.messages import (
    CopyCast,
    MessageStore,
    PackedMessage,
    in_turns,
    messages_by,
    unpack,
)
from llamarl.publish.transports.routes import End


class RdmaSender:
    """Writes messages to the targets in turns, one write at a time; see `TransportSender`."""

    def __init__(self, route: Route, end: End) -> None:
        self._route, self._rank, self._timeout_s = route, end.rank, end.timeout_s
        self._messages = messages_by("target_rank", route)
        assert end.rdma is not None
        self._rdma = end.rdma
        self._memory = torch.empty(0, dtype=torch.uint8)
        store = end.messages or MessageStore(0)
        self._taker = store.join(route, self._memory.device)
        self._is_closed = False

    def write(
        self, bucket: int, handles: Mapping[int, StagingHandle], copy_cast: CopyCast
    ) -> Fingerprints:
        written = Fingerprints()
        for turn, (rank, index, message) in enumerate(in_turns(self._messages[bucket])):
            address = handles[rank].address
            assert isinstance(address, dict), "an rdma handle has addresses by source rank"
            pack = partial(message.fill, copy_cast=copy_cast)
            place = handles[rank].version, bucket, turn
            packed = self._taker.take(place, message.num_bytes, pack)
            if packed is None:
                if self._memory.numel() < message.num_bytes:
                    self._memory = torch.empty(message.num_bytes, dtype=torch.uint8)
                packed = PackedMessage(self._memory, pack(self._memory))
            written.merge(packed.sums)
            if self._is_closed:
                raise TargetLost(f"generator {self._route.replica} was disconnected")
            handle, ready = address[self._rank][index], packed.memory[: message.num_bytes]
            try:
                self._rdma.write(handle, ready, self._timeout_s)
            except (RuntimeError, TimeoutError, OSError) as error:
                raise TargetLost(
                    f"generator {self._route.replica} rank {rank} is out of reach: {error}"
                ) from error
        return written

    def close(self) -> None:
        self._is_closed = True
        self._taker.leave()


class RdmaReceiver:
    """Inboxes of one target rank, taken apart when it verifies; see `TransportReceiver`."""

    def __init__(self, route: Route, end: End) -> None:
        assert end.rdma is not None
        self._rdma, rank = end.rdma, end.rank
        self._flat = torch.empty(0)  # what is open
        self._messages = messages_by("source_rank", route)
        sizes: defaultdict[tuple[int, int], int] = defaultdict(int)
        for by_source in self._messages:
            for source, index, message in in_turns(by_source):
                sizes[source, index] = max(sizes[source, index], message.num_bytes)
        require_memory(f"inboxes of generator {route.replica} rank {rank}", sum(sizes.values()))
        self._inboxes = {
            place: torch.empty(num_bytes, dtype=torch.uint8) for place, num_bytes in sizes.items()
        }
        self._handles: dict[tuple[int, int, int], object] = {}

    def open(
        self, version: int, bucket: int, flat: Tensor, arrived: Callable[[str], None]
    ) -> object:
        self._flat = flat
        return {
            source: [self._handle(source, i, made[i].num_bytes) for i in range(len(made))]
            for source, made in self._messages[bucket].items()
        }

    def arrive(self, version: int, bucket: int) -> None:
        for source, index, message in in_turns(self._messages[bucket]):
            unpack(message, self._inboxes[source, index], self._flat)
        platform_of(self._flat.device).synchronize(self._flat.device)

    def abort(self) -> None:
        return  # the inboxes are overwritten by the next bucket

    def close(self) -> None:
        for handle in self._handles.values():
            self._rdma.forget(handle)
        self._handles.clear()

    def _handle(self, source: int, index: int, num_bytes: int) -> object:
        place = (source, index, num_bytes)
        if place not in self._handles:
            self._handles[place] = self._rdma.register(self._inboxes[source, index][:num_bytes])
        return self._handles[place]
