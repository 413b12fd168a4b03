"""The form in which columns travel in a call between processes.

Owns: that form, and the compressed one for slow links. Does not own: how a call travels. Invariant:
the bytes of a message are those of its arrays plus a few per row: no padding, no pickled object per
row.
"""

import zlib
from typing import Any

import numpy as np

from llamarl.types import Columns

Message = dict[str, tuple[np.ndarray, np.ndarray]]
"""Column name -> (the rows' values one after the other, the rows' lengths)."""

Compressed = dict[str, tuple[tuple[str, bytes], tuple[str, bytes]]]
"""The same, each array as (dtype, compressed bytes)."""


def encode(columns: Columns) -> Message:
    """Join the rows of each column, whose cells are 1-D arrays of one dtype."""
    message: Message = {}
    for name, cells in columns.items():
        values = np.concatenate(cells) if cells else np.empty(0)
        message[name] = values, np.array([len(cell) for cell in cells], dtype=np.int32)
    return message


def decode(message: Message) -> Columns:
    """Undo `encode`. The cells are read-only views into one array per column."""
    columns: Columns = {}
    for name, (values, lengths) in message.items():
        values.flags.writeable = False
        columns[name] = np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
    return columns


def decode_compressed(message: Compressed) -> Columns:
    """Undo `encode` and the compression, which loses nothing."""
    return decode({name: (_expand(*a), _expand(*b)) for name, (a, b) in message.items()})


class PackedColumns(dict[str, list[np.ndarray]]):
    """Columns that are pickled in their compact form and arrive as a plain dict."""

    def __reduce__(self) -> Any:
        return decode, (encode(self),)


class CompressedColumns(PackedColumns):
    """The same for a slow link. Making one compresses: a core takes a second for 90 MB."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        packed = encode(columns).items()
        self._message = {name: (_compress(a), _compress(b)) for name, (a, b) in packed}

    def __reduce__(self) -> Any:
        return decode_compressed, (self._message,)


def _compress(values: np.ndarray) -> tuple[str, bytes]:
    """The first bytes of all numbers, then the second ones, and so on: most of them are alike."""
    planes = values.view(np.uint8).reshape(len(values), values.itemsize).T
    coder = zlib.compressobj(strategy=zlib.Z_RLE)  # twice as fast as others, and as short here
    return values.dtype.str, coder.compress(planes.tobytes()) + coder.flush()


def _expand(dtype: str, data: bytes) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
