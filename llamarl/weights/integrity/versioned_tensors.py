"""Versioned tensors: which tensors of a source hold which version, and who reads them now.

Owns: the labels of the present tensors and of one older set, and the snapshot. Does not own: who
changes the tensors (trainer, weight buffer) or the copies (`writer.py`). Invariant: nothing changes
tensors while a copy reads them as version v, and after `invalidate(v)` no copy begins to.

Two sets at most: the present one, and an older one that a write may still read: a snapshot (of a
trainer, whose step changes the present tensors in place) or the memory that was active before (of a
generator, whose commit makes other memory the present). A read lasts for one copy or one message,
so `invalidate` waits that long and no longer; a write of an invalidated version gets StaleVersion
at its next copy.

A device may still compute what is labelled. So a set has a mark of the device's queue, and what a
reader launches comes after it; a reader waits for its results, so what is launched after
`begin_step` and `invalidate` comes after its copies.

Readers are the connected replicas. A reader that has not acknowledged the present version is
pending: a step keeps a snapshot for it. A slow reader, one at another site, may need longer than a
step: the snapshot that it has begun to read is kept until it has it, and a version between is not.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamarl.device.devices import platform_of
from llamarl.errors import StaleVersion


@dataclass(slots=True)
class _Set:
    """Tensors by buffer name; `version` None: not to be read. A snapshot stays for `pending`, of
    which some have `begun`. `await_values` lets what a thread launches next come after them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    await_values: Callable[[], None] = lambda: None
    version: int | None = None
    num_reading: int = 0
    pending: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)


class VersionedTensors:
    """Thread-safe; `tensors` are the present ones, without a version until `label` names it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._changed = threading.Condition()
        self._present = _Set(_detached(tensors))
        self._older = _Set()
        self._readers: set[int] = set()
        self._slow: set[int] = set()
        self._pending: set[int] = set()
        self._is_announced = False

    @property
    def version(self) -> int | None:
        """The label of the present tensors; None before the first and while they change."""
        return self._present.version

    def label(self, version: int, tensors: dict[str, Tensor] | None = None) -> None:
        """Label the present tensors; `tensors` take their place if given (same names, views).

        What they replace can still be read under its own version, until `invalidate` or the next
        such call.
        """
        with self._changed:
            if tensors is not None:
                self._replace(_detached(tensors))
            self._present.version, self._present.begun = version, set()
            self._present.await_values = _mark(self._present.tensors)
            self._is_announced = False
            self._pending = set(self._readers)

    def announce(self) -> None:
        """The present version will be published: every reader will ask for it."""
        with self._changed:
            self._is_announced = True

    def add_reader(self, replica: int, *, is_slow: bool = False) -> None:
        """A replica was connected; the present version is pending for it."""
        with self._changed:
            self._readers.add(replica)
            (self._slow.add if is_slow else self._slow.discard)(replica)
            self._pending.add(replica)

    def remove_reader(self, replica: int) -> None:
        """A replica was disconnected."""
        with self._changed:
            self._readers.discard(replica)
            self._pending.discard(replica)
            self._drop_snapshot(replica)

    def acknowledge(self, replica: int, version: int) -> None:
        """A write of `version` to `replica` was completed."""
        with self._changed:
            if version == self._present.version:
                self._is_announced = True
                self._pending.discard(replica)
            if self._older.version is not None and version >= self._older.version:
                self._drop_snapshot(replica)

    def begin_step(self) -> None:
        """Return once the caller may change the present tensors; they have no version then.

        Takes a snapshot if a reader is pending and the present version was announced or some write
        of it has begun. It replaces the snapshot before, in the same memory, unless a slow reader
        is amid that one; and is given back when no reader needs it any more.
        """
        with self._changed:
            version = self._present.version
            is_needed = version is not None and self._is_announced and bool(self._pending)
            older = self._older
            is_kept = older.version is not None and bool(self._slow & older.pending & older.begun)
            is_needed = is_needed and not is_kept
            if is_needed:
                self._close(self._older)
        if is_needed:  # writes go on reading the present tensors meanwhile
            for name, tensor in self._present.tensors.items():
                if name not in self._older.tensors:
                    self._older.tensors[name] = tensor.clone()
                else:
                    self._older.tensors[name].copy_(tensor)
        with self._changed:
            if is_needed:
                self._older.version, self._older.pending = version, set(self._pending)
                self._older.begun = set(self._present.begun)
                self._older.await_values = _mark(self._older.tensors)
                if not self._pending:  # all have acknowledged meanwhile
                    self._older = _Set()
            self._close(self._present)

    def release(self) -> None:
        """Give back the memory of the older set; writes that need it get StaleVersion."""
        with self._changed:
            self._close(self._older)
            self._older = _Set()

    def invalidate(self, version: int) -> None:
        """Return once no copy reads `version` and none will; no effect if it is not held."""
        with self._changed:
            for each in (self._present, self._older):
                if each.version == version:
                    self._close(each)

    @contextmanager
    def reading(self, version: int, replica: int | None = None) -> Iterator[dict[str, Tensor]]:
        """The tensors that hold `version`, unchanged as long as the block lasts; StaleVersion.
        `replica` is the reader, if it is one."""
        with self._changed:
            held = next((s for s in (self._present, self._older) if s.version == version), None)
            if held is None:
                raise StaleVersion(
                    f"version {version} is not there to be read, the present one is "
                    f"{self._present.version}"
                )
            held.num_reading += 1
            if replica is not None:
                held.begun.add(replica)
            if held is self._present:
                self._is_announced = True
        try:
            held.await_values()
            yield held.tensors
        finally:
            with self._changed:
                held.num_reading -= 1
                self._changed.notify_all()

    def _replace(self, tensors: dict[str, Tensor]) -> None:
        """With the lock held: make `tensors` the present ones; other memory becomes the older."""
        before = self._present
        if tensors.keys() != before.tensors.keys():
            raise ValueError(f"buffers must be {sorted(before.tensors)}, got {sorted(tensors)}")
        is_other = any(
            tensors[name].data_ptr() != old.data_ptr() for name, old in before.tensors.items()
        )
        if before.version is not None and is_other:
            self._close(self._older)
            self._older = before
        else:
            self._close(before)
        self._present = _Set(tensors)

    def _drop_snapshot(self, replica: int) -> None:
        """With the lock held: this replica no longer needs the snapshot; the last one frees it."""
        if replica in self._older.pending:
            self._older.pending.discard(replica)
            if not self._older.pending:
                self._older = _Set()  # a copy that still reads it keeps its memory

    def _close(self, held: _Set) -> None:
        """With the lock held: let no new copy read the set, and wait for those that do."""
        held.version = None
        self._changed.wait_for(lambda: held.num_reading == 0)


def _mark(tensors: dict[str, Tensor]) -> Callable[[], None]:
    """The point that the queue of their device has come to."""
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return platform_of(device).mark(device)


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
