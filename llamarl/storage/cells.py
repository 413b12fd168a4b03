"""Where the cells of some columns and rows lie in memory.

Owns: the order in which cells follow one another, and the arrays seen in them. Does not own:
memory. Invariant: cells that are joined have no gap between them, and those of the widest entries
come first, so each cell begins at a multiple of its entries' size if the first does of ALIGNMENT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from llamarl.types import Columns

ALIGNMENT = 8  # bytes
NUMERIC = "biuf"  # kinds of dtypes
JOINED_BYTES = 2048  # cells that are smaller on average are copied together, as each costs more


@dataclass(frozen=True, slots=True)
class Cells:
    """Of `dtypes` (by column), each int64 [columns, rows]: in which memory a cell is, its first
    byte there, and its number of entries."""

    dtypes: Mapping[str, np.dtype]
    which: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each cell."""
        return self.lengths * widths(self.dtypes)[:, None]

    def up_to(self, limit_bytes: int) -> "Cells":
        """Those of as many of the first rows as have so many bytes together; at least of one."""
        sums = np.cumsum(self.sizes.sum(axis=0))
        if not len(sums) or sums[-1] <= limit_bytes:
            return self
        rows = slice(max(1, int(np.searchsorted(sums, limit_bytes, "right"))))
        return Cells(self.dtypes, self.which[:, rows], self.starts[:, rows], self.lengths[:, rows])

    def views(self, memories: Sequence[memoryview]) -> Columns:
        """The arrays themselves; read-only if the memory is."""
        columns: Columns = {}
        for place, (name, dtype) in enumerate(self.dtypes.items()):
            which, lengths = self.which[place], self.lengths[place]
            firsts = self.starts[place] // dtype.itemsize
            bounds = firsts.tolist(), (firsts + lengths).tolist()
            used = np.unique(which).tolist()
            values = {i: entries(memories[i], dtype) for i in used}
            if len(used) == 1:
                (one,) = values.values()
                columns[name] = [one[a:b] for a, b in zip(*bounds, strict=True)]
            else:
                placed = zip(which.tolist(), *bounds, strict=True)
                columns[name] = [values[i][a:b] for i, a, b in placed]
        return columns


def dtypes_of(columns: Columns) -> dict[str, np.dtype]:
    """By column. ValueError if there is none, or unless its cells are 1-D arrays of one numeric
    dtype."""
    if not columns:
        raise ValueError("a write must have columns, got none")
    dtypes: dict[str, np.dtype] = {}
    for name, cells in columns.items():
        kinds = set(map(attrgetter("dtype"), cells))
        if len(kinds) != 1 or set(map(attrgetter("ndim"), cells)) != {1}:
            found = {(cell.ndim, cell.dtype.str) for cell in cells}
            raise ValueError(f"column {name} must hold 1-D arrays of one dtype, got {found}")
        (dtype,) = kinds
        if dtype.kind not in NUMERIC or dtype.itemsize > ALIGNMENT or not dtype.isnative:
            raise ValueError(f"column {name} must hold numbers of at most 8 bytes, got {dtype}")
        dtypes[name] = dtype
    return dtypes


def pack(columns: Columns) -> tuple[dict[str, np.dtype], np.ndarray, list[np.ndarray]]:
    """(dtype by column, lengths int64 [columns, rows], buffers with all cells one after another).
    ValueError as of `dtypes_of`."""
    dtypes = dict(sorted(dtypes_of(columns).items(), key=lambda item: -item[1].itemsize))
    ordered = [cell for name in dtypes for cell in columns[name]]
    lengths = np.fromiter(map(len, ordered), np.int64, len(ordered))
    lengths = lengths.reshape(len(dtypes), -1)
    num_bytes = int((lengths * widths(dtypes)[:, None]).sum())
    if num_bytes < JOINED_BYTES * len(ordered):
        ordered = [_joined(ordered)]
    elif not all(map(attrgetter("flags.c_contiguous"), ordered)):
        ordered = [np.ascontiguousarray(cell) for cell in ordered]
    return dtypes, lengths, ordered


def _joined(cells: list[Any]) -> np.ndarray:
    """Their bytes."""
    try:
        data = b"".join(cells)
    except TypeError:  # one has gaps
        whole: list[Any] = [np.ascontiguousarray(cell) for cell in cells]
        data = b"".join(whole)
    return np.frombuffer(data, np.uint8)


def joined(dtypes: Mapping[str, np.dtype], lengths: np.ndarray, start: int) -> Cells:
    """Cells that follow one another in this order, column by column, from byte `start` on."""
    ends = np.cumsum(lengths * widths(dtypes)[:, None]).reshape(lengths.shape)
    starts = start + ends - lengths * widths(dtypes)[:, None]
    return Cells(dtypes, np.zeros_like(lengths), starts, lengths)


def widths(dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """Bytes of an entry of each column, int64 [columns]."""
    return np.array([dtype.itemsize for dtype in dtypes.values()], np.int64)


def entries(memory: memoryview, dtype: np.dtype) -> np.ndarray:
    """All of `memory` as entries, but for what is left at its end."""
    return np.frombuffer(memory[: memory.nbytes // dtype.itemsize * dtype.itemsize], dtype)
