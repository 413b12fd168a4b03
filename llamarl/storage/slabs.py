"""Slabs: the files in which a storage unit keeps the bytes of its rows.

Owns: the files, their sizes, and when one is given back. Does not own: which rows they are
(`table.py`), when a slab moves to disk (`spill.py`). Invariant: a byte that was written never
changes, so a process that has mapped a slab may go on reading; and no slab has a name, so nothing
is left of it once all processes that know it have ended.
"""

import os
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.memory_file import Buffer, memory_file, read_all, write_all
from llamarl.storage.cells import ALIGNMENT, Cells, widths

FULL_BYTES = 4 * 1024 * 1024  # a slab that small writes share takes no more of them then
SPARE_BYTES = 128 * 1024 * 1024  # of empty slabs kept for the next writes
ADOPTED_SHARE = 0.5  # of the files that the process may have open


@dataclass(eq=False, slots=True, kw_only=True)
class Slab:
    """A file without a name: in memory, or on disk once it was spilled."""

    number: int
    file: int
    is_spilled: bool
    is_own: bool = False  # of one write, not shared by several
    num_bytes: int = 0
    live_bytes: int = 0  # of cells whose rows are not retired
    num_cells: int = 0  # those
    is_held: bool = False  # bytes are being copied from or to it, so it stays
    num_readers: int = 0  # answers with this file that clients may still look at

    @property
    def end(self) -> int:
        """Where the next bytes may begin."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


class Slabs:
    """All slabs of a unit, and the sums of their bytes."""

    def __init__(self) -> None:
        self.memory_bytes = 0
        self.spilled_bytes = 0
        self.by_number: dict[int, Slab] = {}  # oldest first
        self.shared: Slab | None = None  # takes small writes
        self._spares: dict[Slab, None] = {}  # empty, oldest first
        self._next_number = random.getrandbits(48)  # no other unit's, whose clients may know them
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = 2**16 if hard == resource.RLIM_INFINITY else hard
        self._max_files = int(most * ADOPTED_SHARE)

    def append(self, buffers: Sequence[Buffer]) -> tuple[Slab, int]:
        """Copy `buffers`, one after another, into a slab that others share; (it, first byte)."""
        slab = self.shared
        if slab is None:
            slab = self.shared = self.add(memory_file())
        start = slab.end
        if num_bytes := write_all(slab.file, buffers, start):
            self.grow(slab, start + num_bytes)
        if slab.num_bytes >= FULL_BYTES:
            self.shared = None
        return slab, start

    def adopt(self, file: int) -> Slab:
        """Keep the bytes of `file`, which stays the caller's, without a copy."""
        slab = self.add(os.dup(file))
        self.grow(slab, os.fstat(file).st_size)
        slab.is_own = True
        return slab

    def lend(self, num_bytes: int) -> list[int]:
        """The file, now the caller's, of a spare slab of about this size, if there is one: to write
        there is several times as fast as into memory that the kernel has yet to clear."""
        for slab in self._spares:
            fits = 0.8 * num_bytes <= slab.num_bytes <= 1.25 * num_bytes
            if fits and slab.num_readers == 0:
                self._forget(slab)
                return [slab.file]
        return []

    def drop_spares(self, limit_bytes: int = 0) -> None:
        """Give memory back until spare slabs have at most so many bytes."""
        while sum(slab.num_bytes for slab in self._spares) > limit_bytes:
            slab = next(iter(self._spares))
            self._forget(slab)
            os.close(slab.file)

    def drop_empty(self) -> None:
        """Give back all slabs without a cell, also the one that takes small writes."""
        self.drop_spares()
        slab, self.shared = self.shared, None
        if slab is not None and slab.num_cells:
            self.shared = slab
        elif slab is not None:
            self.free_if_empty(slab)

    def read_done(self, numbers: Sequence[int]) -> None:
        """Clients look at these slabs no more, each in one answer."""
        for number in numbers:
            if number in self.by_number:
                self.by_number[number].num_readers -= 1

    @property
    def may_adopt(self) -> bool:
        """Whether one more file may be open."""
        return len(self.by_number) < self._max_files

    def add(self, file: int, *, is_spilled: bool = False) -> Slab:
        """An empty slab; it owns `file`."""
        slab = Slab(number=self._next_number, file=file, is_spilled=is_spilled)
        self._next_number += 1
        self.by_number[slab.number] = slab
        return slab

    def grow(self, slab: Slab, num_bytes: int) -> None:
        """Count the slab's bytes as so many."""
        if slab.is_spilled:
            self.spilled_bytes += num_bytes - slab.num_bytes
        else:
            self.memory_bytes += num_bytes - slab.num_bytes
        slab.num_bytes = num_bytes

    def is_sparse(self, slab: Slab) -> bool:
        """Whether most of its memory is taken by retired rows and can be given back."""
        is_fixed = slab is self.shared or slab.is_held or slab.is_spilled
        return slab.num_cells > 0 and not is_fixed and 2 * slab.live_bytes < slab.num_bytes

    def free_if_empty(self, slab: Slab) -> None:
        """Give the slab's bytes back if all its rows are retired and no others will come."""
        if slab.num_cells == 0 and slab is not self.shared and not slab.is_held:
            if slab.is_own:
                self._spares[slab] = None
                self.drop_spares(SPARE_BYTES)
            else:
                self._forget(slab)
                os.close(slab.file)

    def _forget(self, slab: Slab) -> None:
        self.grow(slab, 0)
        self._spares.pop(slab, None)
        del self.by_number[slab.number]

    def close(self) -> None:
        """Give everything back."""
        for slab in self.by_number.values():
            os.close(slab.file)
        self.by_number.clear()

    def copy(self, cells: Cells, start: int = 0) -> tuple[Cells, memoryview]:
        """The cells joined, which begins at byte `start`, and the memory that has them then;
        read-only. `cells.which` has slab numbers."""
        order = np.argsort(-widths(cells.dtypes), kind="stable")
        which, starts, sizes = (each[order] for each in (cells.which, cells.starts, cells.sizes))
        memory = memoryview(bytearray(int(sizes.sum())))
        self.copy_bytes(which.ravel(), starts.ravel(), sizes.ravel(), memory)
        starts[order] = start + np.cumsum(sizes).reshape(sizes.shape) - sizes
        found = Cells(cells.dtypes, np.zeros_like(which), starts, cells.lengths)
        return found, memory.toreadonly()

    def copy_bytes(
        self, which: np.ndarray, starts: np.ndarray, sizes: np.ndarray, into: memoryview
    ) -> None:
        """Join these bytes of slabs, each int64 [cells]; what is joined already is one read."""
        some = sizes > 0
        which, starts, ends = which[some], starts[some], (starts + sizes)[some]
        if not len(which):
            return
        breaks = (starts[1:] != ends[:-1]) | (which[1:] != which[:-1])
        firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        lasts = np.append(firsts[1:], len(ends)) - 1
        runs = which[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist()
        offset = 0
        for number, start, end in zip(*runs, strict=True):
            read_all(self.by_number[number].file, start, into[offset : offset + end - start])
            offset += end - start
