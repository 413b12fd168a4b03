"""The safetensors format: a header read and checked, a file written at known offsets.

Owns: bytes of one file. Does not own: which tensors a model needs (`hf.py`). Invariant: a writer
holds no tensor; whatever comes goes straight to its place in the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PAGE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `dtype` in the format's spelling, byte range within the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors in a safetensors file, by name, without reading their data.

    Raises ValueError if the file is no safetensors file or is shorter or longer than its header
    says (a broken download, a Git LFS pointer).
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= size <= min(MAX_HEADER_BYTES, num_bytes - 8):
            raise ValueError(
                f"{path} must be a whole safetensors file, got {num_bytes} bytes without a valid "
                "header: fetch it again"
            )
        text = file.read(size)
    try:
        values = json.loads(text)
        values.pop("__metadata__", None)
        entries = {
            name: Entry(
                value["dtype"],
                tuple(value["shape"]),
                value["data_offsets"][0],
                value["data_offsets"][1],
            )
            for name, value in values.items()
        }
        expected = 8 + size + _data_bytes(entries)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a safetensors file, got a damaged header") from error
    if num_bytes != expected:
        raise ValueError(
            f"{path} must be {expected} bytes long as its header says, got {num_bytes}: fetch it "
            "again"
        )
    return entries


def _data_bytes(entries: Mapping[str, Entry]) -> int:
    """Bytes of all tensors; ValueError unless they lie end to end and fit their shapes."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        size = entry.stop - entry.start
        if entry.dtype in DTYPES and size != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
            raise ValueError("a tensor's byte range does not fit its shape")
        if entry.start != position or size < 0:
            raise ValueError("tensors overlap or leave a gap")
        position = entry.stop
    return position


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
