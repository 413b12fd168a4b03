"""The two ends of a transport, and the messages into which packed transports cut the copies of a
route."""

from __future__ import annotations

import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from llamarl.core.device.devices import platform_of
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import Copy, Route, StagingHandle
from llamarl.publish.reshard import DTYPE_BYTES

CopyCast = Callable[[Copy, Tensor], int]
"""A function that copies the values of a Copy, cast, into a tensor of its shape and target dtype,
and returns their partial fingerprint. It may raise StaleVersion."""


class TransportSender(Protocol):
    """Writes one source rank's copies into one replica's memory."""

    def write(self, handles: Mapping[int, StagingHandle], copy_cast: CopyCast) -> Fingerprints:
        """Copy the rank's boxes into the memory of `handles` (by target rank).

        Returns the sum of the partial fingerprints that `copy_cast` gave, once the targets can see
        the bytes. Raises TargetLost, or what `copy_cast` raises, once the targets know that nothing
        more will come."""

    def close(self) -> None:
        """Unmap or disconnect from the targets' memory. A write in progress ends with TargetLost,
        and nothing of it reaches memory that is prepared again."""


class TransportReceiver(Protocol):
    """Takes one target rank's messages apart into its staging memory."""

    def open(self, version: int, flat: Tensor, arrived: Callable[[str], None]) -> object:
        """Get ready for `version`, which goes into `flat`. Returns the staging handle's address.

        `arrived(name)` may be called, from any thread and once, as soon as all of a parameter lies
        there; parameters that it was not called for lie there when `arrive` returns."""

    def arrive(self, version: int) -> None:
        """Wait until the whole version lies in the staging memory. Raises RuntimeError if it no
        longer can."""

    def abort(self) -> None:
        """Let nothing of the open version reach the staging memory any more."""

    def close(self) -> None:
        """Release connections and memory."""


PREFIX_BYTES = 8  # of a compressed message: how long its top bytes are
ALIGN_BYTES = 16  # pieces begin where vector loads are fast
Side = Literal["source_rank", "target_rank"]


@dataclass(frozen=True, slots=True)
class Message:
    """The pieces of a message with the byte where each begins, its values in the order of the
    target's memory; `num_bytes` in all."""

    pieces: tuple[tuple[Copy, int], ...]
    num_bytes: int

    def each(self, memory: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """Yield each piece with its view of `memory` (uint8 [num_bytes or more])."""
        for copy, begin in self.pieces:
            dtype = getattr(torch, copy.target_dtype)
            end = begin + math.prod(copy.shape) * dtype.itemsize
            strides = _dense(copy.shape, copy.target_strides)
            yield copy, memory[begin:end].view(dtype).as_strided(copy.shape, strides)

    def fill(self, memory: Tensor, copy_cast: CopyCast) -> Fingerprints:
        """Copy the values of all pieces into `memory`. Returns their partial fingerprints."""
        written = Fingerprints()
        for copy, values in self.each(memory):
            written.add(copy.name, copy_cast(copy, values))
        return written


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of this shape without gaps, with the dimensions in the order of other
    strides."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def messages(copies: Sequence[Copy], max_bytes: int) -> list[Message]:
    """Return messages of at most `max_bytes` (or one element) that carry `copies`, each of one
    layer, in their order."""
    made: list[Message] = []
    pieces: list[tuple[Copy, int]] = []
    end = 0
    for whole in copies:
        itemsize = DTYPE_BYTES[whole.target_dtype]
        num_bytes = math.prod(whole.shape) * itemsize
        is_small = num_bytes <= max_bytes
        for copy in (whole,) if is_small else cut(whole, max(1, max_bytes // itemsize)):
            if not is_small:
                num_bytes = math.prod(copy.shape) * itemsize
            begin = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            if pieces and begin + num_bytes > max_bytes:
                made.append(Message(tuple(pieces), end))
                pieces, begin = [], 0
            pieces.append((copy, begin))
            end = begin + num_bytes
    return [*made, Message(tuple(pieces), end)] if pieces else made


def cut(copy: Copy, max_elements: int) -> Iterator[Copy]:
    """Yield pieces of at most `max_elements` (1 or more) each that make up `copy`."""
    if math.prod(copy.shape) <= max_elements:
        yield copy
        return
    dim = next(dim for dim, extent in enumerate(copy.shape) if extent > 1)
    step = max(1, max_elements // (math.prod(copy.shape) // copy.shape[dim]))
    for first in range(0, copy.shape[dim], step):
        yield from cut(copy.slab(dim, first, min(step, copy.shape[dim] - first)), max_elements)


def messages_by(side: Side, route: Route) -> dict[int, list[Message]]:
    """Return the messages of this rank to each target rank, or from each source rank.

    Both ends make the same messages, as the copies between them have the same order at both."""
    by_rank: dict[int, list[Copy]] = {}
    for copy in route.each():
        by_rank.setdefault(getattr(copy, side), []).append(copy)
    return {rank: messages(found, route.message_bytes) for rank, found in sorted(by_rank.items())}


def in_turns(by_rank: Mapping[int, list[Message]]) -> Iterator[tuple[int, int, Message]]:
    """Yield (rank, index, message), with the first messages of all ranks before the second ones."""
    for index in range(max(map(len, by_rank.values()), default=0)):
        for rank, made in by_rank.items():
            if index < len(made):
                yield rank, index, made[index]


def unpack(message: Message, memory: Tensor, flat: Tensor) -> None:
    """Copy the pieces of `memory` to their places in the target's `flat` memory; between devices
    they are there once both have been synchronised."""
    for copy, values in message.each(memory):
        held = flat.view(values.dtype)
        place = held.as_strided(copy.shape, copy.target_strides, copy.target_offset)
        place.copy_(values, non_blocking=True)


def longest(num_bytes: int) -> int:
    """Return the most bytes that `squeeze` makes of this number."""
    return PREFIX_BYTES + num_bytes + num_bytes // 1000 + 64


def squeeze(memory: Tensor, itemsize: int) -> Tensor:
    """Return `memory`, uint8 [a multiple of `itemsize`] of numbers, compressed: a new uint8 [at
    most `longest`]."""
    numbers = memory.view(-1, itemsize)
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    top = coder.compress(numbers[:, -1].numpy().tobytes()) + coder.flush()
    packed = torch.empty(PREFIX_BYTES + len(top) + len(numbers) * (itemsize - 1), dtype=torch.uint8)
    packed[:PREFIX_BYTES].view(torch.int64)[0] = len(top)
    end = PREFIX_BYTES + len(top)
    packed[PREFIX_BYTES:end] = torch.frombuffer(bytearray(top), dtype=torch.uint8)
    if itemsize > 1:
        packed[end:].view(-1, itemsize - 1).copy_(numbers[:, :-1])
    return packed


def expand(packed: Tensor, memory: Tensor, itemsize: int) -> None:
    """Fill `memory` with the numbers that `packed` holds compressed; it may be longer than they
    are."""
    numbers = memory.view(-1, itemsize)
    end = PREFIX_BYTES + int(packed[:PREFIX_BYTES].view(torch.int64)[0])
    top = bytearray(zlib.decompress(packed[PREFIX_BYTES:end].numpy().data))
    numbers[:, -1].copy_(torch.frombuffer(top, dtype=torch.uint8))
    if itemsize > 1:
        rest = packed[end : end + len(numbers) * (itemsize - 1)]
        numbers[:, :-1].copy_(rest.view(-1, itemsize - 1))


Place = tuple[int, int]
"""A message's place among those of a route: version, number."""

Pack = Callable[[Tensor], Mapping[str, int]]
"""A function that fills memory (uint8 [bytes of the message, or more]) with a message, and returns
the partial fingerprints of its values by parameter. It may raise StaleVersion."""


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """A message in memory (uint8 [its bytes, or more]), and the partial fingerprints of its values
    by parameter."""

    memory: Tensor
    sums: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Alike:
    """Senders of the same messages."""

    key: Hashable
    takers: set[Taker] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    """A message of `num_bytes`; `packed` is None until it is packed."""

    num_bytes: int
    packed: PackedMessage | None = None


@dataclass(slots=True, eq=False)
class Taker:
    """The sender of one route, which takes its messages from a `MessageStore`. `place` is that of
    the message taken last, () before the first."""

    alike: _Alike
    device: torch.device
    place: tuple[int, ...] = ()


class MessageStore:
    """The packed messages of one source rank, of at most `max_bytes` together. It is
    thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._alike: dict[Hashable, _Alike] = {}
        self._entries: OrderedDict[tuple[_Alike, Place], _Entry] = OrderedDict()
        self._newest = -1  # no message of an older version is kept
        self._changed = threading.Condition()

    def join(self, route: Route, device: torch.device) -> Taker:
        """Return a taker for a sender over `route`, whose messages are in memory of `device`."""
        key = replace(route, replica=-1, rendezvous="", is_slow=False), device
        with self._changed:
            if route.is_slow:
                return Taker(_Alike(key), device)  # which nobody else joins
            taker = Taker(self._alike.setdefault(key, _Alike(key)), device)
            taker.alike.takers.add(taker)
        return taker

    def clear(self) -> None:
        """Free the memory of all messages that are kept."""
        with self._changed:
            self._drop(list(self._entries))

    def take(self, taker: Taker, place: Place, num_bytes: int, pack: Pack) -> PackedMessage | None:
        """Return the message at `place`, packed now if no alike sender has done so, into memory of
        `num_bytes` on the device of the route.

        Returns None if no other sender is still to take it, or there is no room for it: the caller
        then packs it into memory of its own. Raises what `pack` raises, for this sender alone."""
        key = taker.alike, place
        with self._changed:
            self._changed.wait_for(
                lambda: key not in self._entries or self._entries[key].packed is not None
            )
            taker.place = place
            if key in self._entries:
                found = self._entries[key].packed
                self._entries.move_to_end(key)
                self._drop_unwanted([key])
                return found
            if not self._is_wanted(key) or not self._make_room(place[0], num_bytes):
                return None
            entry = self._entries[key] = _Entry(num_bytes)
            self._num_bytes += num_bytes
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=taker.device)
            packed = PackedMessage(memory, pack(memory))
            platform_of(taker.device).synchronize(taker.device)  # other threads will send it
        except BaseException:
            with self._changed:
                if self._entries.get(key) is entry:
                    self._drop([key])
            raise
        with self._changed:
            entry.packed = packed
            if self._entries.get(key) is entry:  # not dropped meanwhile
                self._drop_unwanted([key])
            self._changed.notify_all()
        return packed

    def leave(self, taker: Taker) -> None:
        """Keep no more messages for this sender, which may still end what it has begun."""
        alike = taker.alike
        with self._changed:
            alike.takers.discard(taker)
            self._drop_unwanted([key for key in self._entries if key[0] is alike])
            if not alike.takers and self._alike.get(alike.key) is alike:
                del self._alike[alike.key]
            if not self._alike:
                self._newest = -1  # the next routes may begin with any version

    def _is_wanted(self, key: tuple[_Alike, Place]) -> bool:
        """Return whether a sender is still to come to this message. Called with the lock held."""
        alike, place = key
        return any(taker.place < place for taker in alike.takers)

    def _make_room(self, version: int, num_bytes: int) -> bool:
        """Drop other messages for a message of `version`, and return whether it may be kept. Called
        with the lock held."""
        if version < self._newest or num_bytes > self._max_bytes:
            return False
        if version > self._newest:
            self._newest = version
            self._drop([key for key in self._entries if key[1][0] < version])
        for key, entry in list(self._entries.items()):
            if self._num_bytes + num_bytes <= self._max_bytes:
                break
            if entry.packed is not None:
                self._drop([key])
        return self._num_bytes + num_bytes <= self._max_bytes

    def _drop_unwanted(self, keys: list[tuple[_Alike, Place]]) -> None:
        self._drop([key for key in keys if not self._is_wanted(key)])

    def _drop(self, keys: list[tuple[_Alike, Place]]) -> None:
        """Forget these messages; a sender that waits for one that is being packed packs it itself.
        Called with the lock held."""
        for key in keys:
            self._num_bytes -= self._entries.pop(key).num_bytes
        if keys:
            self._changed.notify_all()
