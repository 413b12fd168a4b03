"""Which rows a storage unit holds, and where each of their cells is.

Owns: the rule that a cell is written once, except that a partial rollout may be written again, and
what a trainer finds with every step that uses a rollout. Does not own: bytes (`slabs.py`), what
becomes of retired rows (`executors/storage.py`). Invariant: all columns of a write become visible
at once; a slab whose rows are mostly retired is joined again, so rows take at most twice the memory
that they need.

A unit serves 100,000 rows per second, so nothing here is done cell by cell: a row has a slot, and
tables with an entry per column and slot say where its cells are.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llamarl.dataflow.columns import COLUMNS
from llamarl.errors import NotStored
from llamarl.storage.cells import Cells, widths
from llamarl.storage.slabs import Slab, Slabs
from llamarl.types import (
    CLIPPED,
    FINISH_CODES,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    TRAINER_LOGPROBS,
    FinishReason,
)

CUT = FINISH_CODES[FinishReason.SEGMENT]  # of a partial row
# Of the last step that used the rollout; where the policy is its own reference, those of this too.
OF_A_STEP = {TRAINER_LOGPROBS, PROXIMAL_LOGPROBS, REF_LOGPROBS, LOSS_WEIGHTS, CLIPPED}
NOWHERE = -1  # the slab of a cell that was not written


class Table:
    """The rows of one unit."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._slots: dict[int, int] = {}  # by row id
        self._free: list[int] = []
        self._dtypes = {name: np.dtype(column.dtype) for name, column in COLUMNS.items()}
        self._index = {name: index for index, name in enumerate(COLUMNS)}
        # Each int64 [columns, slots].
        self._which = np.full((len(COLUMNS), 0), NOWHERE, np.int64)
        self._starts, self._lengths = np.zeros((2, len(COLUMNS), 0), np.int64)
        self._is_partial = np.zeros(0, np.bool_)  # by slot

    def __len__(self) -> int:
        return len(self._slots)

    def check(self, row_ids: list[int], dtypes: Mapping[str, np.dtype]) -> None:
        """ValueError or RuntimeError unless these columns of these rows may be written."""
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
        # Counted before the cells that they replace are released, which may lie in the same slab:
        # it would be joined again, or given back, without them.
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
        """Where these cells are: `which` has slab numbers. NotStored for a row that is not,
        KeyError for one that lacks a column."""
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
        """Those of these rows that are stored, with the names of their columns: rows with the same
        ones together."""
        rows = [row_id for row_id in dict.fromkeys(row_ids) if row_id in self._slots]
        slots = np.array([self._slots[row_id] for row_id in rows], np.int64)
        written = (self._which[:, slots] != NOWHERE).T
        patterns, inverse = np.unique(written, axis=0, return_inverse=True)
        names = np.array(list(self._index))
        return [
            ([rows[i] for i in np.flatnonzero(inverse == number)], names[pattern].tolist())
            for number, pattern in enumerate(patterns)
        ]

    def retire(self, row_ids: Iterable[int]) -> None:
        """Free these rows, of which some may not be stored."""
        slots = [self._slots.pop(row_id) for row_id in row_ids if row_id in self._slots]
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
        """Whether no rollout in the slab is partial."""
        partial = np.flatnonzero(self._is_partial)
        return not (self._which[:, partial] == slab.number).any()

    def move(self, slab: Slab, target: Slab, shift: int) -> None:
        """Take the bytes of `slab` from `target` from now on, where they are `shift` further on."""
        cells = self._which == slab.number
        self._which[cells] = target.number
        self._starts[cells] += shift
        target.num_cells += slab.num_cells
        target.live_bytes += slab.live_bytes
        slab.num_cells = slab.live_bytes = 0

    def _names(self, slot: int) -> list[str]:
        return sorted(n for n, index in self._index.items() if self._which[index, slot] != NOWHERE)

    def _places(self, names: Iterable[str]) -> np.ndarray:
        """Which rows of the tables the columns are, int64 [columns, 1]; makes those of new ones."""
        for name in names:
            if name not in self._index:
                self._index[name] = len(self._index)
                self._grow(columns=1)
        return np.array([[self._index[name]] for name in names], np.int64).reshape(-1, 1)

    def _take_slots(self, row_ids: list[int]) -> np.ndarray:
        """The slots of these rows; rows that are not stored get one."""
        new = [row_id for row_id in row_ids if row_id not in self._slots]
        if len(new) > len(self._free):
            first = self._which.shape[1]
            more = max(1024, first, len(new))
            self._grow(slots=more)
            self._free += range(first + more - 1, first - 1, -1)
        for row_id in new:
            self._slots[row_id] = self._free.pop()
        return np.array([self._slots[row_id] for row_id in row_ids], np.int64)

    def _grow(self, columns: int = 0, slots: int = 0) -> None:
        more = ((0, columns), (0, slots))
        self._which = np.pad(self._which, more, constant_values=NOWHERE)
        self._starts, self._lengths = np.pad(self._starts, more), np.pad(self._lengths, more)
        self._is_partial = np.pad(self._is_partial, more[1])

    def _cells(self, columns: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(slab numbers, bytes) of these cells, each int64 [columns, slots], as they are."""
        width = widths({name: self._dtypes[name] for name in self._index})[columns]
        return self._which[columns, slots], self._lengths[columns, slots] * width

    def _forget(self, columns: np.ndarray, slots: np.ndarray) -> None:
        """Let go of these cells, as far as there are any."""
        which, sizes = self._cells(columns, slots)
        self._which[columns, slots] = NOWHERE
        self._release(which, sizes)

    def _release(self, which: np.ndarray, sizes: np.ndarray) -> None:
        """Give back what memory is left by cells that the tables do not name any more: the slab
        numbers (NOWHERE: no cell) and bytes of each."""
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
        """Move what is left of a slab to where small writes go."""
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
