"""Reads and writes one safetensors file at known offsets.

Owns: bytes of one file. Does not own: which tensors a model needs (`inventory.py`) or its header's
meaning (`header.py`). Invariant: neither end holds a tensor; a writer puts whatever comes straight
into its place in the file, a reader asks the file for the bytes of a box and no others.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch

from llamarl.models.header import ITEM_BYTES, read_header

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PAGE_BYTES = 2**24


class FileReader:
    """Reads boxes of the tensors of one safetensors file; a context manager.

    ValueError like `read_header`.
    """

    def __init__(self, path: Path) -> None:
        self._entries = read_header(path)
        end = max((entry.stop for entry in self._entries.values()), default=0)
        self._first = path.stat().st_size - end
        self._file = path.open("rb", buffering=0)
        self._page = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, name: str, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill `target` with the box of tensor `name` (of 1 or 2 dimensions) that begins at index
        `start` and has its shape, casting.

        Whole rows are read in one go. Of rows that the box cuts, each piece is read by itself, and
        the kernel is asked to read nothing around it: what leaves the disk are its pages.
        """
        if target.numel() == 0:
            return
        entry = self._entries[name]
        item_bytes = ITEM_BYTES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * item_bytes
        piece_bytes = math.prod(target.shape[1:]) * item_bytes
        is_cut = piece_bytes < row_bytes
        os.posix_fadvise(
            self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM if is_cut else os.POSIX_FADV_NORMAL
        )
        place = self._first + entry.start + start[0] * row_bytes
        place += start[1] * item_bytes if is_cut else 0
        num_rows = max(1, PAGE_BYTES // piece_bytes)
        for rows in target.split(num_rows):
            page = self._buffer(len(rows) * piece_bytes)
            pieces = page.split(piece_bytes) if is_cut else [page]
            for i, piece in enumerate(pieces):
                self._fill(piece, place + i * row_bytes)
            rows.copy_(page.view(DTYPES[entry.dtype]).view(rows.shape))
            place += len(rows) * row_bytes

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if len(self._page) < num_bytes:
            self._page = torch.empty(num_bytes, dtype=torch.uint8)
        return self._page[:num_bytes]

    def _fill(self, piece: torch.Tensor, place: int) -> None:
        view = piece.numpy().data
        while view:
            num_bytes = os.preadv(self._file.fileno(), [view], place)
            if num_bytes == 0:
                raise OSError(f"{self._file.name} ended at byte {place}")
            view, place = view[num_bytes:], place + num_bytes


class FileWriter:
    """Writes one safetensors file of known names and shapes, tensors in any order.

    A context manager: leaving it without an error flushes the file to disk. RuntimeError then if
    a tensor was not written.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._shapes = dict(shapes)
        self._missing = set(shapes)
        header, self._starts = _layout(shapes, dtype)
        self._file = path.open("wb")
        self._file.write(header)
        self._first = len(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Cast `tensor` and put it in its place; ValueError if its shape is not the one planned."""
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"{name} must have shape {self._shapes[name]}, got {tuple(tensor.shape)}"
            )
        self._file.seek(self._first + self._starts[name])
        flat = tensor.detach().reshape(-1)
        for page in flat.split(PAGE_BYTES):  # casting a page at a time needs no second tensor
            page = page.to(device="cpu", dtype=self._dtype).contiguous()
            self._file.write(page.view(torch.uint8).numpy())
        self._missing.discard(name)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if kind is None and self._missing:
            raise RuntimeError(f"{self._path} lacks {sorted(self._missing)}: nothing wrote them")


def _layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor starts after it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        starts[name] = start
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return struct.pack("<Q", len(text)) + text, starts
