"""Packed messages that go to several replicas: a source rank packs and sums each of them once.

Owns: which messages are kept, for whom, and who packs one that several need at once. Does not own:
what is in a message (`packed.py`) or sending it. Invariant: a message that is given out is whole
and never written again, and no sender waits for another but while that one packs the message that
both need: never for its replica.

Senders are alike if their routes have equal copies, so that they send the same bytes in the same
order. A message is kept as long as an alike sender has not come to it, and `max_bytes` allow: the
message used least recently goes first, and all of a version when a newer one is asked for. One that
was dropped stays with the senders that have it. A slow route, whose messages are squeezed and which
lags whole versions behind, is alike to none.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from llamarl.device.devices import platform_of
from llamarl.weights.layout.boxes import Route

Place = tuple[int, int, int]
"""Where a message is among those of a route: version, bucket, number within the bucket."""

Pack = Callable[[Tensor], Mapping[str, int]]
"""Fills memory (uint8 [bytes of the message, or more]) with a message; returns the partial
fingerprints of its values by parameter. StaleVersion."""


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
    takers: set["Taker"] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    """A message of `num_bytes`; `packed` once it is."""

    num_bytes: int
    packed: PackedMessage | None = None


class Taker:
    """What the sender of one route takes its messages by; made by `MessageStore.join`. `place` is
    that of the message taken last, () before the first."""

    def __init__(self, store: "MessageStore", alike: _Alike, device: torch.device) -> None:
        self._store, self.alike, self.device = store, alike, device
        self.place: tuple[int, ...] = ()

    def take(self, place: Place, num_bytes: int, pack: Pack) -> PackedMessage | None:
        """The message at `place`, packed now if no alike sender has done so, into memory of
        `num_bytes` on the device of the route.

        None if no other sender is still to come to it, or it has no room: the caller then packs it
        into memory of its own. Raises what `pack` raises, for this sender alone.
        """
        return self._store._take(self, place, num_bytes, pack)

    def leave(self) -> None:
        """Nothing is kept for this sender any more; it may still end what it has begun."""
        self._store._leave(self)


class MessageStore:
    """The messages of one source rank, of at most `max_bytes` together. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._alike: dict[Hashable, _Alike] = {}
        self._entries: OrderedDict[tuple[_Alike, Place], _Entry] = OrderedDict()
        self._newest = -1  # no message of an older version is kept
        self._changed = threading.Condition()

    def join(self, route: Route, device: torch.device) -> Taker:
        """A sender over `route`, with its messages in memory of `device`."""
        key = replace(route, replica=-1, rendezvous="", is_slow=False), device
        with self._changed:
            if route.is_slow:
                return Taker(self, _Alike(key), device)  # which nobody else joins
            taker = Taker(self, self._alike.setdefault(key, _Alike(key)), device)
            taker.alike.takers.add(taker)
        return taker

    def clear(self) -> None:
        """Give back the memory of all messages that are kept."""
        with self._changed:
            self._drop(list(self._entries))

    def _take(self, taker: Taker, place: Place, num_bytes: int, pack: Pack) -> PackedMessage | None:
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

    def _leave(self, taker: Taker) -> None:
        alike = taker.alike
        with self._changed:
            alike.takers.discard(taker)
            self._drop_unwanted([key for key in self._entries if key[0] is alike])
            if not alike.takers and self._alike.get(alike.key) is alike:
                del self._alike[alike.key]
            if not self._alike:
                self._newest = -1  # the next routes may begin with any version

    def _is_wanted(self, key: tuple[_Alike, Place]) -> bool:
        """With the lock held: whether a sender is still to come to this message."""
        alike, place = key
        return any(taker.place < place for taker in alike.takers)

    def _make_room(self, version: int, num_bytes: int) -> bool:
        """With the lock held: whether a message of `version` may be kept, once others made room."""
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
        """With the lock held: forget these; who waits for one that is being packed packs it too."""
        for key in keys:
            self._num_bytes -= self._entries.pop(key).num_bytes
        if keys:
            self._changed.notify_all()
