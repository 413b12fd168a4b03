"""The form in which columns travel in a call between processes.

Owns: that form. Does not own: how a call travels. Invariant: the bytes of a message are those of
its arrays plus a few per row: no padding, no pickled object per row.
"""

from typing import Any

import numpy as np

from llamarl.types import Columns

Message = dict[str, tuple[np.ndarray, np.ndarray]]
"""Column name -> (the rows' values one after the other, the rows' lengths)."""


def encode(columns: Columns) -> Message:
    """Join the rows of each column. ValueError if a cell is not 1-D or a column mixes dtypes."""
    message: Message = {}
    for name, cells in columns.items():
        kinds = {(cell.ndim, cell.dtype.str) for cell in cells}
        if len(kinds) > 1 or any(ndim != 1 for ndim, _ in kinds):
            raise ValueError(f"column {name} must hold 1-D arrays of one dtype, got {kinds}")
        values = np.concatenate(cells) if cells else np.empty(0)
        message[name] = values, np.array([len(cell) for cell in cells], dtype=np.int32)
    return message


def decode(message: Message) -> Columns:
    """Undo `encode`. The cells are views into one array per column."""
    return {
        name: np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
        for name, (values, lengths) in message.items()
    }


class PackedColumns(dict[str, list[np.ndarray]]):
    """Columns that are pickled in their compact form and arrive as a plain dict."""

    def __reduce__(self) -> Any:
        return decode, (encode(self),)
