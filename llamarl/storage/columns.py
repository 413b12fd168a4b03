"""The columns of rollouts, the places of their cells in memory, and their form in a call."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from llamarl.core.fields import require
from llamarl.core.records import (
    CLIPPED,
    EPISODE_REWARD,
    EPISODE_REWARDS,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    LOSS_WEIGHTS,
    PROMPT_ID,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    RECORD,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
    Columns,
)

NUMBER, RESPONSE, PROMPT, FIXED, TEXT = "number", "response", "prompt", "fixed", "text"
BYTES, SEVERAL = "bytes", "several"
LENGTHS = {
    NUMBER: "one number per rollout",
    RESPONSE: "one entry per response token",
    PROMPT: "one entry per prompt token",
    FIXED: "as many entries in each rollout",
    TEXT: "UTF-8, one entry per byte",
    SEVERAL: "as many entries for each response token",
    BYTES: "bytes, as many for each token that the model read",
}
DTYPES = ("float64", "float32", "int64", "int32", "uint8")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of array: a 1-D array of `dtype` per rollout, of a `length` in LENGTHS.

    Example: `Column("teacher_logprobs", "float32", "response")`. Raises ValueError for another
    dtype, or a length other than "number" and "response" in a recipe's own column."""

    name: str
    dtype: str = "float64"
    length: str = NUMBER

    def __post_init__(self) -> None:
        check_name("a column", self.name)
        where = f"of column {self.name}"
        allowed = f"be one of {', '.join(DTYPES)}"
        require(self.dtype in DTYPES, f"dtype {where}", allowed, self.dtype)
        allowed = f"be {NUMBER} or {RESPONSE}"
        require(self.length in LENGTHS, f"length {where}", allowed, self.length)
        fits = self.length != NUMBER or self.dtype == "float64"
        require(fits, f"dtype {where}", "be float64, for it is a number", self.dtype)


def check_name(of: str, name: object) -> None:
    """Raise ValueError unless a column or stage can have this name, which is part of metrics'
    names."""
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
    must = "be up to 40 small letters, digits and _, with a letter first"
    require(is_name, f"the name of {of}", must, name)


COLUMNS = {
    column.name: column
    for column in (
        Column(PROMPT_IDS, "int32", PROMPT),
        Column(RESPONSE_IDS, "int32", RESPONSE),
        Column(GENERATOR_LOGPROBS, "float32", RESPONSE),
        Column(TOKEN_VERSIONS, "int32", RESPONSE),
        Column(ROUTED_EXPERTS, "uint8", BYTES),
        Column(KEPT_IDS, "int32", SEVERAL),
        Column(SAMPLING, "float64", FIXED),
        Column(REWARD),
        Column(EPISODE_REWARD),
        Column(EPISODE_REWARDS, "float64", FIXED),
        Column(PROMPT_ID),
        Column(TURNS, "uint8", TEXT),
        Column(RECORD, "uint8", TEXT),
        Column(REF_LOGPROBS, "float32", RESPONSE),
        Column(TRAINER_LOGPROBS, "float32", RESPONSE),
        Column(PROXIMAL_LOGPROBS, "float32", RESPONSE),
        Column(LOSS_WEIGHTS, "uint8", RESPONSE),
        Column(CLIPPED, "uint8", RESPONSE),
    )
}
"""The columns that the package's own stages write, by name."""

# Names that a stage's function may read although no column holds them.
PROMPT_RECORD = "prompt"  # the rollout's `records.Prompt`, which has the whole row of the data file
COMPLETION = "completion"  # the response as text, decoded from RESPONSE_IDS
DERIVED = {PROMPT_RECORD: (), COMPLETION: (RESPONSE_IDS, TOKEN_VERSIONS)}
"""Name -> the columns it is made from; versions show where the last turn of an episode begins."""
RECORDED = (PROMPT_ID, TURNS, LOSS_WEIGHTS, CLIPPED)
"""The columns that a stage writes for the archive only; no function of a recipe computes them."""


def stored_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that hold what a stage reads by these names, each once."""
    return [*dict.fromkeys(each for name in names for each in DERIVED.get(name, (name,)))]


Message = dict[str, tuple[np.ndarray, np.ndarray]]
"""Column name -> (the rows' values one after the other, the rows' lengths)."""

Compressed = dict[str, tuple[tuple[str, bytes], tuple[str, bytes]]]
"""Column name -> values and lengths as in Message, each array as (dtype, compressed bytes)."""


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
    """PackedColumns for a slow link. Making one compresses: a core takes a second for 90 MB."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        packed = encode(columns).items()
        self._message = {name: (_compress(a), _compress(b)) for name, (a, b) in packed}

    def __reduce__(self) -> Any:
        return decode_compressed, (self._message,)


def _compress(values: np.ndarray) -> tuple[str, bytes]:
    """Compress the first bytes of all numbers, then the second ones, and so on, as most of them are
    alike."""
    planes = values.view(np.uint8).reshape(len(values), values.itemsize).T
    coder = zlib.compressobj(strategy=zlib.Z_RLE)  # twice as fast as others, and as short here
    return values.dtype.str, coder.compress(planes.tobytes()) + coder.flush()


def _expand(dtype: str, data: bytes) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


ALIGNMENT = 8  # bytes
NUMERIC = "biuf"  # kinds of dtypes
JOINED_BYTES = 2048  # cells that are smaller on average are copied together, as each costs more


@dataclass(frozen=True, slots=True)
class Cells:
    """The places of cells. `dtypes` is by column; the others are int64 [columns, rows]: the memory
    that a cell is in, its first byte there, and its number of entries."""

    dtypes: Mapping[str, np.dtype]
    which: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The bytes of each cell."""
        return self.lengths * widths(self.dtypes)[:, None]

    def up_to(self, limit_bytes: int) -> Cells:
        """Return as many of the first rows as have so many bytes together; at least one."""
        sums = np.cumsum(self.sizes.sum(axis=0))
        if not len(sums) or sums[-1] <= limit_bytes:
            return self
        rows = slice(max(1, int(np.searchsorted(sums, limit_bytes, "right"))))
        return Cells(self.dtypes, self.which[:, rows], self.starts[:, rows], self.lengths[:, rows])

    def views(self, memories: Sequence[memoryview]) -> Columns:
        """Return the arrays themselves; they are read-only if the memory is."""
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
    """Return the dtypes by column. Raises ValueError if there is no column, or unless each one's
    cells are 1-D arrays of one numeric dtype."""
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
    """Return the dtype by column, lengths int64 [columns, rows], and buffers with all cells one
    after another. Raises ValueError as `dtypes_of` does."""
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
    """Return the bytes of all cells, joined."""
    try:
        data = b"".join(cells)
    except TypeError:  # one has gaps
        whole: list[Any] = [np.ascontiguousarray(cell) for cell in cells]
        data = b"".join(whole)
    return np.frombuffer(data, np.uint8)


def joined(dtypes: Mapping[str, np.dtype], lengths: np.ndarray, start: int) -> Cells:
    """Return the cells that follow one another in this order, column by column, from byte `start`
    on."""
    ends = np.cumsum(lengths * widths(dtypes)[:, None]).reshape(lengths.shape)
    starts = start + ends - lengths * widths(dtypes)[:, None]
    return Cells(dtypes, np.zeros_like(lengths), starts, lengths)


def widths(dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """Return the bytes of an entry of each column, int64 [columns]."""
    return np.array([dtype.itemsize for dtype in dtypes.values()], np.int64)


def entries(memory: memoryview, dtype: np.dtype) -> np.ndarray:
    """Return all of `memory` as entries, without the bytes that are left at its end."""
    return np.frombuffer(memory[: memory.nbytes // dtype.itemsize * dtype.itemsize], dtype)
