"""The header of a safetensors file, read and checked.

Owns: what a file says about its tensors. Does not own: their data. Invariant: torch-free, because
the controller's process checks checkpoints before any other process starts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamarl.json_file import parse

T = TypeVar("T")

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes that weights may have
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `dtype` in the format's spelling, byte range within the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorEntry]:
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
        values = parse(text)
        values.pop("__metadata__", None)
        entries = {
            name: TensorEntry(
                _typed(value["dtype"], str),
                tuple(_typed(size, int) for size in value["shape"]),
                _typed(value["data_offsets"][0], int),
                _typed(value["data_offsets"][1], int),
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


def _typed(value: T, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _data_bytes(entries: Mapping[str, TensorEntry]) -> int:
    """Bytes of all tensors; ValueError unless they lie end to end and fit their shapes."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        size = entry.stop - entry.start
        if entry.dtype in ITEM_BYTES and size != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise ValueError("a tensor's byte range does not fit its shape")
        if entry.start != position or size < 0:
            raise ValueError("tensors overlap or leave a gap")
        position = entry.stop
    return position
