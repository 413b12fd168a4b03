"""Writes one safetensors file at known offsets.

Owns: bytes of one file. Does not own: which tensors a model needs (`inventory.py`). Invariant: a
writer holds no tensor; whatever comes goes straight to its place in the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PAGE_BYTES = 2**24


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
