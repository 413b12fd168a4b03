"""The rows of a storage unit, the files that keep their bytes, and the spilling to disk when memory
runs short."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamarl.core.errors import NotStored, RepeatedWarnings
from llamarl.core.memory import Buffer, memory_file, read_all, write_all
from llamarl.core.records import (
    CLIPPED,
    EPISODE_ROWS,
    FINISH_CODES,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    TRAINER_LOGPROBS,
    FinishReason,
    episode_of,
)
from llamarl.storage.columns import ALIGNMENT, COLUMNS, Cells, widths

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
        """The byte where the next cells may begin."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


class Slabs:
    """The slabs of a unit, and the sums of their bytes."""

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
        """Copy `buffers`, one after another, into a slab that several writes share. Returns the
        slab and the first byte."""
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
        """Return the file of a spare slab of about this size, which is now the caller's, if there
        is one: writing there is several times as fast as writing into memory that the kernel has
        yet to clear."""
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
        """Note that clients look at these slabs no more, each in one answer."""
        for number in numbers:
            if number in self.by_number:
                self.by_number[number].num_readers -= 1

    @property
    def may_adopt(self) -> bool:
        """Whether one more file may be open."""
        return len(self.by_number) < self._max_files

    def add(self, file: int, *, is_spilled: bool = False) -> Slab:
        """Make an empty slab, which owns `file`."""
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
        """Return whether most of the slab's memory is taken by retired rows and can be given
        back."""
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
        """Return the cells joined, as if they began at byte `start`, and the memory that holds
        them, which is read-only. `cells.which` has slab numbers."""
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
        """Join these bytes of slabs, each int64 [cells]; neighbouring bytes are one read."""
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


log = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024 * 1024  # a file takes no more slabs then
COPIED_BYTES = 1024 * 1024  # at once
PAUSE_S = 10.0  # after the disk took nothing


class Spill:
    """Moves the oldest slabs whose rollouts are complete to files in `folder`, while all slabs in
    memory have more than `limit_bytes` (0: no limit)."""

    def __init__(self, table: Table, slabs: Slabs, folder: str | None, limit_bytes: int) -> None:
        self._table, self._slabs = table, slabs
        self._folder = Path(folder) if folder is not None else None
        self._limit_bytes = limit_bytes
        self.is_short = False  # the host has next to no memory left, whatever the limit
        self._file: Slab | None = None
        self._lock = asyncio.Lock()
        self._next_s = 0.0  # the disk was full: not before
        self._is_closed = False
        self._warnings = RepeatedWarnings(log)

    @property
    def is_over(self) -> bool:
        """Whether the slabs in memory should be fewer."""
        limit_bytes = 0 if self.is_short else self._limit_bytes or float("inf")
        return self._slabs.memory_bytes > limit_bytes

    async def relieve(self) -> None:
        """Return once no more slabs than allowed are in memory, or no further one can move."""
        async with self._lock:
            while self.is_over and not self._is_closed:
                self._slabs.drop_empty()
                may_move = self._folder is not None and time.monotonic() >= self._next_s
                slab = self._oldest() if self.is_over and may_move else None
                if slab is None:
                    return
                try:
                    await self._move(slab)
                except OSError as error:
                    return self._refuse(error)

    async def close(self) -> None:
        """Move no more slabs, once a move in progress has ended, and remove the folder, unless
        another unit uses it."""
        self._is_closed = True
        async with self._lock:
            pass
        if self._folder is not None:
            with suppress(OSError):
                self._folder.rmdir()

    def _oldest(self) -> Slab | None:
        for slab in self._slabs.by_number.values():
            if not slab.is_spilled and slab.num_cells and self._table.is_complete(slab):
                if slab is self._slabs.shared:
                    self._slabs.shared = None
                return slab
        return None

    async def _move(self, slab: Slab) -> None:
        file = self._file
        if file is None or file.num_bytes + slab.num_bytes > FILE_BYTES or not file.num_cells:
            file = self._file = self._slabs.add(self._open(), is_spilled=True)
        slab.is_held = file.is_held = True
        start = file.end
        try:
            await asyncio.to_thread(_copy, slab, file.file, start)
            self._slabs.grow(file, start + slab.num_bytes)
            self._table.move(slab, file, start)
        except OSError:
            os.ftruncate(file.file, file.num_bytes)
            raise
        finally:
            for each in (slab, file):
                each.is_held = False
                self._slabs.free_if_empty(each)

    def _open(self) -> int:
        """Open a new file without a name."""
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        path = self._folder / uuid.uuid4().hex
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return file

    def _refuse(self, error: OSError) -> None:
        self._next_s = time.monotonic() + PAUSE_S
        self._warnings.warn(
            "%s takes no rollouts (%s): they stay in memory, and no new ones are asked for while "
            "that is over its limit (experience.max_bytes)",
            self._folder,
            error.strerror,
        )


def _copy(slab: Slab, file: int, start: int) -> None:
    """Copy a slab's bytes into another file. Raises OSError if the disk is full."""
    memory = memoryview(bytearray(min(COPIED_BYTES, slab.num_bytes)))
    for offset in range(0, slab.num_bytes, COPIED_BYTES):
        some = memory[: slab.num_bytes - offset]
        read_all(slab.file, offset, some)
        write_all(file, [some], start + offset)


CUT = FINISH_CODES[FinishReason.SEGMENT]  # of a partial row
# Columns of the last step that used the rollout; REF_LOGPROBS if the policy is its own reference.
OF_A_STEP = {TRAINER_LOGPROBS, PROXIMAL_LOGPROBS, REF_LOGPROBS, LOSS_WEIGHTS, CLIPPED}
NOWHERE = -1  # the slab of a cell that was not written


class Table:
    """The rows of one unit."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._slots: dict[int, int] = {}  # by row id
        self._conversations: dict[int, list[int]] = {}  # rows after an episode's first, by that
        self._free: list[int] = []
        self._dtypes = {name: np.dtype(column.dtype) for name, column in COLUMNS.items()}
        self._index = {name: index for index, name in enumerate(COLUMNS)}
        # Each is int64 [columns, slots].
        self._which = np.full((len(COLUMNS), 0), NOWHERE, np.int64)
        self._starts, self._lengths = np.zeros((2, len(COLUMNS), 0), np.int64)
        self._is_partial = np.zeros(0, np.bool_)  # by slot

    def __len__(self) -> int:
        return len(self._slots)

    def check(self, row_ids: list[int], dtypes: Mapping[str, np.dtype]) -> None:
        """Raise ValueError or RuntimeError unless these columns of these rows may be written."""
        if len(set(row_ids)) != len(row_ids):
            raise ValueError(f"row ids of one write must differ, got {row_ids}")
        for name, dtype in dtypes.items():
            if dtype != self._dtypes.get(name, dtype):
                raise ValueError(f"column {name} must be 1-D {self._dtypes[name]}, got {dtype}")
        known = [row_id for row_id in row_ids if row_id in self._slots]
        slots = np.array([self._slots[row_id] for row_id in known], np.int64)
        names = sorted(self._index.keys() & dtypes.keys(), key=self._index.__getitem__)
        written = self._which[self._places(names), slots] != NOWHERE
        written[[name in OF_A_STEP for name in names]] = False
        for column, row in np.argwhere((written & ~self._is_partial[slots]).T)[:1, ::-1]:
            name = names[column]
            raise RuntimeError(f"row {known[row]} already has column {name} and is not partial")

    def add(self, row_ids: list[int], slab: Slab, cells: Cells, codes: np.ndarray | None) -> None:
        """Make checked rows visible. `codes` are finish codes [rows]; None if SAMPLING is not among
        the columns."""
        self._dtypes |= cells.dtypes
        slots, columns, sizes = self._take_slots(row_ids), self._places(cells.dtypes), cells.sizes
        # New cells are counted before the replaced ones are released: both may lie in one slab, and
        # it would otherwise be joined again, or given back, without the new ones.
        slab.num_cells += sizes.size
        slab.live_bytes += int(sizes.sum())
        if not sizes.size:
            self._slabs.free_if_empty(slab)
        replaced, replaced_sizes = self._cells(columns, slots)
        self._which[columns, slots] = slab.number
        self._starts[columns, slots] = cells.starts
        self._lengths[columns, slots] = cells.lengths
        if codes is not None:
            self._is_partial[slots] = codes == CUT
        self._release(replaced, replaced_sizes)

    def locate(self, row_ids: list[int], names: Sequence[str]) -> Cells:
        """Return where these cells are; its `which` has slab numbers. Raises NotStored for a row
        that is not stored, KeyError for a row that lacks a column."""
        try:
            slots = np.array([self._slots[row_id] for row_id in row_ids], np.int64)
        except KeyError:
            missing = next(row_id for row_id in row_ids if row_id not in self._slots)
            wanted = f"column {names[0]} was asked for" if names else "no column was asked for"
            raise NotStored(f"row {missing} is not stored ({wanted})") from None
        for name in names:
            if name not in self._index:
                has = self._names(int(slots[0])) if len(slots) else []
                raise KeyError(f"row {row_ids[0]} has no column {name}, only {has}")
        columns = self._places(names)
        which = self._which[columns, slots]
        for column, row in np.argwhere(which == NOWHERE)[:1]:
            has = self._names(int(slots[row]))
            raise KeyError(f"row {row_ids[row]} has no column {names[column]}, only {has}")
        dtypes = {name: self._dtypes[name] for name in names}
        return Cells(dtypes, which, self._starts[columns, slots], self._lengths[columns, slots])

    def groups(self, row_ids: Iterable[int]) -> list[tuple[list[int], list[str]]]:
        """Return the stored ones of these rows, with the names of their columns: rows with the same
        columns together."""
        rows = [row_id for row_id in dict.fromkeys(row_ids) if row_id in self._slots]
        slots = np.array([self._slots[row_id] for row_id in rows], np.int64)
        written = (self._which[:, slots] != NOWHERE).T
        patterns, inverse = np.unique(written, axis=0, return_inverse=True)
        names = np.array(list(self._index))
        return [
            ([rows[i] for i in np.flatnonzero(inverse == number)], names[pattern].tolist())
            for number, pattern in enumerate(patterns)
        ]

    def with_conversations(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return these rows and, after each, those of the further conversations of its episode."""
        if not self._conversations:
            return row_ids
        return [i for row_id in row_ids for i in (row_id, *self._conversations.get(row_id, ()))]

    def retire(self, row_ids: Iterable[int]) -> None:
        """Free these rows, of which some may not be stored."""
        row_ids = [row_id for row_id in dict.fromkeys(row_ids) if row_id in self._slots]
        slots = [self._slots.pop(row_id) for row_id in row_ids]
        for first in {episode_of(row_id)[0] for row_id in row_ids if row_id >= EPISODE_ROWS}:
            left = [row_id for row_id in self._conversations.pop(first) if row_id in self._slots]
            if left:
                self._conversations[first] = left
        everything = np.arange(len(self._index))[:, None]
        self._is_partial[slots] = False
        self._forget(everything, np.array(slots, np.int64))
        self._free += slots

    def erase(self, row_ids: Iterable[int], names: Iterable[str]) -> None:
        """Free these cells, as far as they are written."""
        slots = [self._slots[row_id] for row_id in dict.fromkeys(row_ids) if row_id in self._slots]
        columns = self._places([name for name in dict.fromkeys(names) if name in self._index])
        self._forget(columns, np.array(slots, np.int64))

    def is_complete(self, slab: Slab) -> bool:
        """Return whether no rollout in the slab is partial."""
        partial = np.flatnonzero(self._is_partial)
        return not (self._which[:, partial] == slab.number).any()

    def move(self, slab: Slab, target: Slab, shift: int) -> None:
        """Move cells from `slab` to `target`, where their bytes are `shift` further on."""
        cells = self._which == slab.number
        self._which[cells] = target.number
        self._starts[cells] += shift
        target.num_cells += slab.num_cells
        target.live_bytes += slab.live_bytes
        slab.num_cells = slab.live_bytes = 0

    def _names(self, slot: int) -> list[str]:
        return sorted(n for n, index in self._index.items() if self._which[index, slot] != NOWHERE)

    def _places(self, names: Iterable[str]) -> np.ndarray:
        """Return the places of the columns in the tables, int64 [columns, 1], after adding new
        ones."""
        for name in names:
            if name not in self._index:
                self._index[name] = len(self._index)
                self._grow(columns=1)
        return np.array([[self._index[name]] for name in names], np.int64).reshape(-1, 1)

    def _take_slots(self, row_ids: list[int]) -> np.ndarray:
        """Return the slots of these rows; rows that are not stored get one."""
        new = [row_id for row_id in row_ids if row_id not in self._slots]
        if len(new) > len(self._free):
            first = self._which.shape[1]
            more = max(1024, first, len(new))
            self._grow(slots=more)
            self._free += range(first + more - 1, first - 1, -1)
        for row_id in new:
            self._slots[row_id] = self._free.pop()
            if row_id >= EPISODE_ROWS:
                self._conversations.setdefault(episode_of(row_id)[0], []).append(row_id)
        return np.array([self._slots[row_id] for row_id in row_ids], np.int64)

    def _grow(self, columns: int = 0, slots: int = 0) -> None:
        more = ((0, columns), (0, slots))
        self._which = np.pad(self._which, more, constant_values=NOWHERE)
        self._starts, self._lengths = np.pad(self._starts, more), np.pad(self._lengths, more)
        self._is_partial = np.pad(self._is_partial, more[1])

    def _cells(self, columns: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slab numbers and the bytes of these cells, each int64 [columns, slots]."""
        width = widths({name: self._dtypes[name] for name in self._index})[columns]
        return self._which[columns, slots], self._lengths[columns, slots] * width

    def _forget(self, columns: np.ndarray, slots: np.ndarray) -> None:
        """Release these cells, as far as there are any."""
        which, sizes = self._cells(columns, slots)
        self._which[columns, slots] = NOWHERE
        self._release(which, sizes)

    def _release(self, which: np.ndarray, sizes: np.ndarray) -> None:
        """Give back the memory of cells that the tables do not name any more: the slab numbers
        (NOWHERE: no cell) and bytes of each."""
        written = which != NOWHERE
        numbers, inverse = np.unique(which[written], return_inverse=True)
        counts, sums = np.bincount(inverse), np.bincount(inverse, sizes[written])
        for number, count, sum_bytes in zip(numbers, counts, sums, strict=True):
            slab = self._slabs.by_number[int(number)]
            slab.num_cells -= int(count)
            slab.live_bytes -= int(sum_bytes)
            if self._slabs.is_sparse(slab):
                self._join_again(slab)
            self._slabs.free_if_empty(slab)

    def _join_again(self, slab: Slab) -> None:
        """Move the cells that are left in a slab to the shared one."""
        columns, slots = np.nonzero(self._which == slab.number)
        width = widths({name: self._dtypes[name] for name in self._index})[columns]
        order = np.argsort(-width, kind="stable")
        columns, slots = columns[order], slots[order]
        sizes = self._lengths[columns, slots] * width[order]
        memory = memoryview(bytearray(int(sizes.sum())))
        self._slabs.copy_bytes(
            self._which[columns, slots], self._starts[columns, slots], sizes, memory
        )
        target, start = self._slabs.append([memory])
        self._which[columns, slots] = target.number
        self._starts[columns, slots] = start + np.cumsum(sizes) - sizes
        target.num_cells += len(sizes)
        target.live_bytes += memory.nbytes
        slab.num_cells = slab.live_bytes = 0
