"""The collective transport: point-to-point messages over gloo, or between GPUs over their own
backend.

Messages end in a trailer: the version and index of the message, and whether the source goes on. A
source whose version became stale says so in place of the next message, and the group stays usable.

A group of GPUs may carry a rank's messages one by one, each waiting for its other end. That cannot
lock up: both ends go by index, then rank of the other end (`in_turns`), so the message that is
first by index, source and target is the next one of both its ends.

Over gloo each message is followed by one byte, and acknowledged by one. Both ends wait for their
byte first: when a connection is lost, gloo fails only the waits for something that has not begun to
arrive, not those in the middle of sending or receiving.

The group holds only the ranks that occur in the route's copies; after any error it is given up as a
whole: the waits of all its ranks fail at once, and only a new route (a new rendezvous) leads to the
replica again."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llamarl.core.device.devices import platform_of
from llamarl.core.errors import StaleVersion, TargetLost
from llamarl.core.process_group import form_group, meet
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import Route, StagingHandle
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.transports.messages import (
    ALIGN_BYTES,
    CopyCast,
    Message,
    MessageStore,
    PackedMessage,
    expand,
    in_turns,
    longest,
    messages_by,
    squeeze,
    unpack,
)
from llamarl.publish.transports.routes import End

TRAILER_BYTES = 24  # version, index, whether the source goes on
POLL_S = 5e-5  # what GPUs send cannot be waited for with a limit; a message takes a millisecond


class RouteGroup:
    """The process group of a route's ranks: sources first, then targets. Forming it waits for all
    of them.

    It is one of GPUs if every rank computes on a GPU of its own, else gloo (messages are host
    memory then). Raises RuntimeError if not all ranks come within `end.timeout_s`, which also
    limits each message."""

    def __init__(self, route: Route, side: str, end: End) -> None:
        members = [("source", rank) for rank in sorted(route.sources)]
        members += [("target", rank) for rank in sorted(route.targets)]
        self._index = {member: index for index, member in enumerate(members)}
        self._timeout = timedelta(seconds=end.timeout_s)
        # The narrowest dtype decides, so that the top byte of every number is compressed.
        self._itemsize = min(DTYPE_BYTES[copy.target_dtype] for copy in route.copies)
        self._is_given_up = False
        index, size = self._index[side, end.rank], len(members)
        store = meet(route.rendezvous, index, size, self._timeout)
        device = end.device
        store.set(f"device-{index}", platform_of(device).card(device).uuid)
        devices = [store.get(f"device-{each}").decode() for each in range(size)]
        self.device = device if all(devices) and len(set(devices)) == size else torch.device("cpu")
        platform_of(self.device).use(self.device)
        # GPUs get twice the limit, so that `finish` times out first.
        limit = self._timeout * (2 if self._on_gpus else 1)
        self._group: Any = form_group(self.device, store, index, size, limit, fails_alone=True)
        self._is_squeezed = route.is_slow and not self._on_gpus

    @property
    def _on_gpus(self) -> bool:
        return self.device.type != "cpu"

    def send(self, memory: Tensor, rank: int, tag: int) -> list[Any]:
        """Begin to send `memory` to target `rank`; `finish` waits for it."""
        peer = self._index["target", rank]
        if self._on_gpus:
            return [self._group.send([memory], peer, tag)]
        if self._is_squeezed:
            memory = squeeze(memory, self._itemsize)
        receipt = self._group.recv([torch.empty(1)], peer, tag)
        sending = (self._group.send([each], peer, tag) for each in (memory, torch.empty(1)))
        return [receipt, *sending]

    def receive(self, memory: Tensor, rank: int, tag: int) -> Callable[[], None]:
        """Begin to fill `memory` with a message of source `rank`. Returns a call that waits until
        it is there, and raises RuntimeError if the group broke."""
        peer = self._index["source", rank]
        arrived = memory
        if self._is_squeezed:  # gloo takes a message that is shorter than its memory
            arrived = torch.empty(longest(memory.numel()), dtype=torch.uint8)
        message = self._group.recv([arrived], peer, tag)
        if self._on_gpus:
            return partial(self.finish, [message])
        end = self._group.recv([torch.empty(1)], peer, tag)

        def finish() -> None:
            self.finish([end, message])
            self.finish([self._group.send([torch.empty(1)], peer, tag)])
            if self._is_squeezed:
                expand(arrived, memory, self._itemsize)

        return finish

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for a message. Raises RuntimeError if the other end is gone or takes too long."""
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        for work in works:
            while self._on_gpus and not work.is_completed():
                if self._is_given_up or time.monotonic() > deadline_s:
                    raise RuntimeError(f"a message took longer than {self._timeout}")
                time.sleep(POLL_S)
            work.wait()

    def give_up(self) -> None:
        """End the group: all waits in it fail, here and at the other ranks."""
        self._is_given_up = True
        if self._on_gpus:
            self._group.abort()
            return
        # gloo has no such call, but closes all connections of a group when a wait times out, and
        # on a closed connection every wait fails at once.
        for peer in set(self._index.values()) - {self._group.rank()}:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))


class CollectiveSender:
    """Sends messages to the targets in turns, one write at a time; see `TransportSender`."""

    def __init__(self, route: Route, end: End) -> None:
        self._route = route
        self._messages = messages_by("target_rank", route)
        try:
            self.group = RouteGroup(route, "source", end)
        except (RuntimeError, ValueError) as error:
            raise TargetLost(f"generator {route.replica} did not meet us: {error}") from error
        self._store = end.messages or MessageStore(0)
        self._taker = self._store.join(route, self.group.device)
        self._is_broken = False

    def write(self, handles: Mapping[int, StagingHandle], copy_cast: CopyCast) -> Fingerprints:
        if self._is_broken:
            raise TargetLost(f"generator {self._route.replica} must be connected again")
        version, by_rank = next(iter(handles.values())).version, self._messages
        num_sent = dict.fromkeys(by_rank, 0)
        buffers = [Tensor(), Tensor()]
        held: list[PackedMessage | None] = [None, None]  # what is being sent
        pending: list[list[Any]] = [[], []]
        written = Fingerprints()
        try:
            for turn, (rank, index, message) in enumerate(in_turns(by_rank)):
                side = turn % 2  # one is being sent while the other is packed
                self._finish(pending, side)
                pack = partial(_pack, message, (version, index, 1), copy_cast)
                held[side] = None
                packed = self._store.take(
                    self._taker, (version, turn), _sealed_bytes(message), pack
                )
                if packed is None:
                    memory = buffers[side] = _room(buffers[side], message, self.group.device)
                    packed = PackedMessage(memory, pack(memory))
                held[side] = packed
                written.merge(packed.sums)
                num_sent[rank] += 1
                pending[side] = self._send(packed.memory, message, rank, (version, index))
        except BaseException:
            for rank, index, message in in_turns(by_rank):
                if index == num_sent[rank]:
                    self._send_end(message, rank, (version, index))
            raise
        finally:
            for side in (0, 1):
                self._finish(pending, side)
        return written

    def close(self) -> None:
        self._is_broken = True
        self._store.leave(self._taker)
        self.group.give_up()

    def _send(
        self, memory: Tensor, message: Message, rank: int, place: tuple[int, int]
    ) -> list[Any]:
        """Begin to send the sealed message; `place`: version, index."""
        try:
            return self.group.send(memory[: _sealed_bytes(message)], rank, _tag(*place))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _finish(self, pending: list[list[Any]], side: int) -> None:
        works, pending[side] = pending[side], []
        if self._is_broken:
            return
        try:
            self.group.finish(works)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TargetLost:
        if not self._is_broken:
            self.close()
        return TargetLost(f"generator {self._route.replica} is out of reach: {error}")

    def _send_end(self, message: Message, rank: int, place: tuple[int, int]) -> None:
        """Tell the target, in place of this message, that nothing more comes of this version."""
        if not self._is_broken:
            memory = _room(Tensor(), message, self.group.device)
            _seal(memory, message, (*place, 0))
            self._finish([self._send(memory, message, rank, place)], 0)


class CollectiveReceiver:
    """Receives on a thread of its own once a version is prepared; see `TransportReceiver`."""

    def __init__(self, route: Route, end: End) -> None:
        self._route = route
        self._messages = messages_by("source_rank", route)
        self._num_pieces = Counter(
            c.name for _, _, message in in_turns(self._messages) for c, _ in message.pieces
        )
        self.group = RouteGroup(route, "target", end)
        self._stream = platform_of(end.device).side_stream(end.device)
        # The memory is kept from publish to publish, as new memory has to be zeroed first.
        self._sides = ([Tensor()], [Tensor()])
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_broken = False

    def open(self, version: int, flat: Tensor, arrived: Callable[[str], None]) -> object:
        if self._is_broken:
            raise RuntimeError(
                f"{self._route.source} must be connected again: the connection was lost"
            )
        self._error = None
        self._thread = threading.Thread(
            target=self._receive,
            args=(version, flat, arrived),
            name="receive-weights",
            daemon=True,
        )
        self._thread.start()
        return None

    def arrive(self, version: int) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"version {version} did not arrive: {self._error}") from self._error

    def abort(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._is_broken = True
            self.group.give_up()
            self._thread.join()
        self._thread = None

    def close(self) -> None:
        self._is_broken = True
        self.group.give_up()
        self.abort()

    def _receive(self, version: int, flat: Tensor, arrived: Callable[[str], None]) -> None:
        """Receive all messages; one is taken apart while the next one arrives."""
        left, to_come = in_turns(self._messages), Counter(self._num_pieces)
        sides = itertools.cycle(self._sides)
        ended: set[int] = set()
        try:
            with self._stream.running():
                arriving = self._begin(left, next(sides), ended, version)
                while arriving is not None:
                    here, goes_on = arriving, arriving.finish(self._route.source)
                    if not goes_on:
                        ended.add(here.rank)
                        lost = f"{self._route.source} rank {here.rank} no longer has it"
                        self._error = StaleVersion(lost)
                    arriving = self._begin(left, next(sides), ended, version)
                    if goes_on:
                        self._take_apart(here, flat, to_come, arrived)
        except Exception as error:  # noqa: BLE001 - raised again by `arrive`
            self._error = error
            if not self._is_broken:
                self._is_broken = True
                self.group.give_up()

    def _take_apart(
        self,
        here: "_Arriving",
        flat: Tensor,
        to_come: Counter[str],
        arrived: Callable[[str], None],
    ) -> None:
        """Put the pieces of a message in their places, and report the parameters that are whole
        now."""
        unpack(here.message, here.memory, flat)
        for device in {self.group.device, flat.device}:
            platform_of(device).synchronize(device)
        for copy, _ in here.message.pieces:
            to_come[copy.name] -= 1
            if not to_come[copy.name]:
                arrived(copy.name)

    def _begin(
        self,
        left: Iterator[tuple[int, int, Message]],
        side: list[Tensor],
        ended: Container[int],
        version: int,
    ) -> "_Arriving | None":
        """Begin to receive the next message that is still to come, into the memory of `side`."""
        for rank, index, message in left:
            if rank not in ended:
                memory = side[0] = _room(side[0], message, self.group.device)
                sealed = memory[: _sealed_bytes(message)]
                wait = self.group.receive(sealed, rank, _tag(version, index))
                return _Arriving(rank, (version, index), message, memory, wait)
        return None


class _Arriving(NamedTuple):
    """A message of source `rank` on its way into `memory`; `place`: version, index."""

    rank: int
    place: tuple[int, int]
    message: Message
    memory: Tensor
    wait: Callable[[], None]

    def finish(self, source: str) -> bool:
        """Wait until the message is there. Returns whether the source goes on."""
        self.wait()
        trailer = self.memory[: _sealed_bytes(self.message)][-TRAILER_BYTES:]
        *found, goes_on = trailer.view(torch.int64).tolist()
        if tuple(found) != self.place:
            raise RuntimeError(
                f"message must be {self.place} (version, index), got {tuple(found)} from "
                f"{source} rank {self.rank}"
            )
        return bool(goes_on)


def _sealed_bytes(message: Message) -> int:
    return -(-message.num_bytes // ALIGN_BYTES) * ALIGN_BYTES + TRAILER_BYTES


def _seal(memory: Tensor, message: Message, trailer: tuple[int, int, int]) -> None:
    """Write the trailer behind the message."""
    sealed = memory[: _sealed_bytes(message)]
    sealed[-TRAILER_BYTES:].view(torch.int64).copy_(torch.tensor(trailer, dtype=torch.int64))


def _pack(
    message: Message, trailer: tuple[int, int, int], copy_cast: CopyCast, memory: Tensor
) -> Fingerprints:
    """Fill `memory` with the message and its trailer. Returns the fingerprints of its values."""
    written = message.fill(memory, copy_cast)
    _seal(memory, message, trailer)
    return written


def _room(memory: Tensor, message: Message, device: torch.device) -> Tensor:
    """Return `memory` if the message and its trailer fit, else new memory; it may be longer than
    needed."""
    num_bytes = _sealed_bytes(message)
    if memory.dtype == torch.uint8 and memory.numel() >= num_bytes:
        return memory
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _tag(version: int, index: int) -> int:
    return (version * 8191 + index + 1) % (1 << 31)
