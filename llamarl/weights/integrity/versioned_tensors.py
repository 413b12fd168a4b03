"""versioned tensors: which tensors of a source hold which version, and who reads them now.

Owns: the labels of the present tensors and of one older set, the snapshot. Does not own: who
changes the tensors (trainer, weight buffer) or the copies (`writer.py`). Invariant: nobody changes
tensors while a copy reads them as version v, and after `retire(v)` no copy begins to.

Two sets at most: the present one, and an older one that a write may still read: a snapshot (of a
trainer, whose step changes the present tensors in place) or the memory that was live before (of a
generator, whose commit makes other memory the present). A read lasts for one copy or one message,
so `retire` waits that long and no longer; writes that need what was retired get StaleVersion at
their next copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from llamarl.errors import StaleVersion


@dataclass(slots=True)
class _Set:
    """Tensors by buffer name; `version` None: not to be read. `owed`: for whom a snapshot stays."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int | None = None
    num_reading: int = 0
    owed: set[int] = field(default_factory=set)


class VersionedTensors:
    """Thread-safe; `tensors` are the present ones, without a version until `label` names it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._changed = threading.Condition()
        self._present = _Set(_detached(tensors))
        self._older = _Set()
        self._owed: set[int] = set()
        self._targets: set[int] = set()
        self._is_announced = False

    @property
    def version(self) -> int | None:
        """The label of the present tensors; None before the first and while they change."""
        return self._present.version

    def label(self, version: int, tensors: dict[str, Tensor] | None = None) -> None:
        """Label the present tensors; `tensors` take their place if given (same names, views).

        What they replace goes on being readable under its own version, until `retire` or the next
        such call.
        """
        with self._changed:
            if tensors is not None:
                if tensors.keys() != self._present.tensors.keys():
                    raise ValueError(
                        f"buffers must be {sorted(self._present.tensors)}, got {sorted(tensors)}"
                    )
                replaced = self._present
                if replaced.version is not None and not _same(replaced.tensors, tensors):
                    self._close(self._older)
                    self._older = replaced
                else:
                    self._close(replaced)
                self._present = _Set(_detached(tensors))
            self._present.version = version
            self._is_announced = False
            self._owed = set(self._targets)

    def announce(self) -> None:
        """The present version will be asked for: all connected replicas are owed it from now."""
        with self._changed:
            self._is_announced = True

    def add_reader(self, replica: int) -> None:
        """A replica was connected; it is owed the present version."""
        with self._changed:
            self._targets.add(replica)
            self._owed.add(replica)

    def remove_reader(self, replica: int) -> None:
        """A replica was disconnected."""
        with self._changed:
            self._targets.discard(replica)
            self._owed.discard(replica)
            self._drop_snapshot(replica)

    def acknowledge(self, replica: int, version: int) -> None:
        """A write of `version` to `replica` was completed."""
        with self._changed:
            if version == self._present.version:
                self._is_announced = True
                self._owed.discard(replica)
            if self._older.version is not None and version >= self._older.version:
                self._drop_snapshot(replica)

    def begin_step(self) -> None:
        """Return once the caller may change the present tensors; they have no version then.

        Takes a snapshot if a replica is owed the present version: one that is connected, while
        some write of that version has begun or it was announced, and whose own write has not been
        completed. It replaces the snapshot before, in the same memory, and is given back when
        nobody is owed it any more.
        """
        with self._changed:
            version = self._present.version
            is_needed = version is not None and self._is_announced and bool(self._owed)
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
                self._older.version, self._older.owed = version, set(self._owed)
                if not self._owed:  # they got it meanwhile
                    self._older = _Set()
            self._close(self._present)

    def release(self) -> None:
        """Give back the memory of the older set; writes that need it get StaleVersion."""
        with self._changed:
            self._close(self._older)
            self._older = _Set()

    def invalidate(self, version: int) -> None:
        """Return once no copy reads `version` and none will; without effect if it is not here."""
        with self._changed:
            for each in (self._present, self._older):
                if each.version == version:
                    self._close(each)

    @contextmanager
    def reading(self, version: int) -> Iterator[dict[str, Tensor]]:
        """The tensors that hold `version`, unchanged as long as the block lasts; StaleVersion."""
        with self._changed:
            held = next((s for s in (self._present, self._older) if s.version == version), None)
            if held is None:
                raise StaleVersion(
                    f"version {version} is not there to be read, the present one is "
                    f"{self._present.version}"
                )
            held.num_reading += 1
            if held is self._present:
                self._is_announced = True
        try:
            yield held.tensors
        finally:
            with self._changed:
                held.num_reading -= 1
                self._changed.notify_all()

    def _drop_snapshot(self, replica: int) -> None:
        """With the lock held: this replica needs it no more; the last one's word frees it."""
        if replica in self._older.owed:
            self._older.owed.discard(replica)
            if not self._older.owed:
                self._older = _Set()  # who still reads it holds its memory

    def _close(self, held: _Set) -> None:
        """With the lock held: let no new copy read the set, and wait for those that do."""
        held.version = None
        self._changed.wait_for(lambda: held.num_reading == 0)


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(a[name].data_ptr() == b[name].data_ptr() for name in a)
