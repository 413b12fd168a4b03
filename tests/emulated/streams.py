"""Streams of the emulated accelerator, and what orders their operations.

Operations run at once, in the order in which threads launch them. On a device those of two streams
run in any order unless something orders them: one stream waited for the other, or the host waited
for one before it launched on the other. Where a memory is used by two streams, and one of them
writes it, without such an order, `use` raises.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

_numbers = itertools.count(1)
_here = threading.local()
_lock = threading.Lock()


class Timeline:
    """What one stream has launched, and up to where it comes after the others."""

    def __init__(self, number: int) -> None:
        self.number, self.num_launched = number, 0
        self.after: dict[int, int] = {}


DEFAULT = Timeline(0)
_host: dict[int, int] = {}  # stream -> what of it the host has waited for


@dataclass
class Uses:
    """Of one memory: the last write and the last read of each stream, as (stream, number)."""

    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)


_uses: weakref.WeakKeyDictionary[torch.UntypedStorage, Uses] = weakref.WeakKeyDictionary()


def new_stream() -> Timeline:
    return Timeline(next(_numbers))


def current() -> Timeline:
    """That of this thread."""
    return getattr(_here, "stream", DEFAULT)


def enter(stream: Timeline) -> Timeline:
    """Make it this thread's; returns the one before."""
    before, _here.stream = current(), stream
    return before


def come_after(stream: Timeline, number: int, launched: int) -> None:
    """What `stream` launches next comes after these operations of another."""
    with _lock:
        stream.after[number] = max(stream.after.get(number, 0), launched)


def host_waited(number: int, launched: int) -> None:
    """The host goes on after these operations, and so does all that is launched from now on."""
    with _lock:
        _host[number] = max(_host.get(number, 0), launched)


def use(read: Iterable[torch.UntypedStorage], written: Iterable[torch.UntypedStorage]) -> None:
    """One operation of this thread's stream. RuntimeError if nothing orders it and another."""
    here = current()
    with _lock:
        here.num_launched += 1
        for storage in read:
            uses = _uses.setdefault(storage, Uses())
            _require(here, uses.written, "reads what", "writes")
            uses.read[here.number] = here.num_launched
        for storage in written:
            uses = _uses.setdefault(storage, Uses())
            _require(here, uses.written, "writes what", "writes")
            for place in uses.read.items():
                _require(here, place, "writes what", "reads")
            uses.written, uses.read = (here.number, here.num_launched), {}


def _require(here: Timeline, place: tuple[int, int] | None, what: str, other: str) -> None:
    if place is None or place[0] == here.number:
        return
    number, launched = place
    if max(here.after.get(number, 0), _host.get(number, 0)) < launched:
        raise RuntimeError(
            f"stream {here.number} {what} stream {number} {other}, and nothing says in which order"
        )
