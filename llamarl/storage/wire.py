"""The packets between a storage unit and its clients on the same host.

    write   row ids, lengths [columns, rows], then the cells as `columns.pack` orders them
    read    row ids
    found   which memory [columns, rows], starts [columns, rows], lengths [columns, rows], then the
            cells that were copied; memory 0 is the body, the others are the files beside it

Every array is at a multiple of 8 bytes of its packet's body, and no cell is copied on its way to a
reader unless that is cheaper than mapping its slab."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamarl.cluster.sockets import MAX_FILES, Message, Packet
from llamarl.core.memory import Buffer, map_file
from llamarl.core.records import Columns
from llamarl.storage.columns import Cells, joined, pack
from llamarl.storage.table import Slab, Slabs

MAPPED_BYTES = 32 * 1024  # to map a slab costs as much as to copy so many bytes
FOUND_BYTES = 64 * 1024 * 1024  # cells copied for one answer; further rows are asked for again
INT = np.dtype(np.int64)


def ints(values: list[int]) -> np.ndarray:
    """Return row ids in the form of a body."""
    return np.array(values, INT)


def write_message(row_ids: list[int], columns: Columns, writer: str) -> Message:
    """Return the message of a write. Raises ValueError as `columns.pack` does."""
    names, body = columns_message(columns)
    header = {"ask": "write", "rows": len(row_ids), "columns": names, "writer": writer}
    return header, [ints(row_ids), *body]


def columns_message(columns: Columns) -> tuple[list[list[str]], list[Buffer]]:
    """Return the names and dtypes of columns, and their body: lengths [columns, rows], then the
    cells as `columns.pack` orders them."""
    dtypes, lengths, cells = pack(columns)
    return _spelled(dtypes), [lengths, *cells]


def read_columns(packet: Packet, num_rows: int) -> Columns:
    """Return the columns in a packet whose body is that of `columns_message` and whose header has
    `columns`."""
    body = packet.open_body()
    return _cells(packet.header, body, 0, num_rows).views([body])


def read_write(header: dict[str, Any], body: memoryview) -> tuple[list[int], Cells]:
    """Return the row ids of a write, and where its cells are in the body."""
    num_rows: int = header["rows"]
    row_ids: list[int] = np.frombuffer(body, INT, num_rows).tolist()
    return row_ids, _cells(header, body, num_rows, num_rows)


def _cells(header: dict[str, Any], body: memoryview, num_before: int, num_rows: int) -> Cells:
    """Return where the cells of a body are that holds so many numbers before their lengths."""
    dtypes = _dtypes(header)
    num_lengths = len(dtypes) * num_rows
    lengths = np.frombuffer(body, INT, num_lengths, INT.itemsize * num_before)
    start = INT.itemsize * (num_before + num_lengths)
    return joined(dtypes, lengths.reshape(len(dtypes), num_rows), start)


def found_message(cells: Cells, slabs: Slabs) -> tuple[dict[str, Any], list[Buffer], list[int]]:
    """Return header, body and files of the answer to a read; perhaps of the first rows only."""
    numbers, which = np.unique(cells.which, return_inverse=True)
    used: list[Slab] = []
    copied: list[Buffer] = []
    if 0 < len(numbers) < MAX_FILES and cells.sizes.sum() >= len(numbers) * MAPPED_BYTES:
        used = [slabs.by_number[number] for number in numbers.tolist()]
        cells = replace(cells, which=which.reshape(cells.which.shape) + 1)
    else:
        cells = cells.up_to(FOUND_BYTES)
        cells, memory = slabs.copy(cells, 3 * INT.itemsize * cells.which.size)
        copied = [memory]
    header = {
        "columns": _spelled(cells.dtypes),
        "rows": cells.which.shape[1],
        "slabs": [[slab.number, slab.num_bytes] for slab in used],
    }
    for slab in used:
        slab.num_readers += 1
    places = np.stack([cells.which, cells.starts, cells.lengths])
    return header, [places, *copied], [slab.file for slab in used]


def read_found(packet: Packet, dropped: Callable[[int], None]) -> Columns:
    """Return the columns in an answer, as read-only arrays, and close the packet. `dropped` is
    called, on any thread, with the number of each slab that came with it once no array of it is
    left."""
    dtypes = _dtypes(packet.header)
    shape = 3, len(dtypes), packet.header["rows"]
    body = packet.open_body()
    files = packet.files[1:] if packet.body_file else packet.files
    memories = [body]
    for file, (number, num_bytes) in zip(files, packet.header["slabs"], strict=True):
        memories.append(map_file(file, num_bytes, partial(dropped, number)))
    packet.close()
    places = np.frombuffer(body[: INT.itemsize * math.prod(shape)], INT).reshape(shape)
    return Cells(dtypes, *places).views(memories)


def _spelled(dtypes: Mapping[str, np.dtype]) -> list[list[str]]:
    return [[name, dtype.str] for name, dtype in dtypes.items()]


def _dtypes(header: dict[str, Any]) -> dict[str, np.dtype]:
    return {name: np.dtype(dtype) for name, dtype in header["columns"]}
