"""Safetensors files: their headers and boxes of their tensors, read by the safetensors library.

The library maps a file into memory. Of a file of 201 MB a rank that needs 25 MB reads its columns
from a cold disk in 0.26 s and its rows in 0.18 s; one pread per row of the box took 3.6 s and 0.12
s. The kernel may read the whole file for that, into a cache that the ranks of a host share.

Importing this and reading a header do not import torch, because the controller's process checks
checkpoints before any other process starts."""

from __future__ import annotations

import functools
import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open

from llamarl.core.files import read_object

if TYPE_CHECKING:
    import torch


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPARED_BYTES = 1 << 24  # at once
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # old Llama files store this constant

log = logging.getLogger(__name__)

FileBox = tuple[Sequence[int], "torch.Tensor"]
"""The index of a tensor where a box begins, and memory of the box's shape."""


class Piece(NamedTuple):
    """The tensor `name` of a file, which holds a box of a parameter: its first index in that, and
    its shape there, which may have ones in front that the tensor lacks."""

    path: Path
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def whole(path: Path, name: str, shape: tuple[int, ...]) -> tuple[Piece]:
    """Return the pieces of a parameter that is one tensor of a file."""
    return (Piece(path, name, (0,) * len(shape), shape),)


class TensorEntry(NamedTuple):
    """A tensor's entry in a header; `dtype` in the format's spelling."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors in a file by name, without reading their data.

    Raises ValueError if the file is no safetensors file, or is shorter or longer than its header
    says (a broken download, a Git LFS pointer)."""
    with _open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return {
            name: TensorEntry(each.get_dtype(), tuple(each.get_shape()))
            for name, each in slices.items()
        }


def read_boxes(
    parameters: Mapping[str, Iterable[Piece]], boxes: Callable[[str], Iterable[FileBox]]
) -> None:
    """Fill the boxes of each of `parameters` from its pieces, casting. Each file is opened once.

    Raises ValueError like `read_header`, or if a box holds a number that is not finite."""
    by_file: dict[Path, list[tuple[str, Piece]]] = {}
    for name, pieces in parameters.items():
        for piece in pieces:
            by_file.setdefault(piece.path, []).append((name, piece))
    wanted = {name: [*boxes(name)] for name in parameters}
    for path, found in by_file.items():
        with _open(path, "pt") as file:
            for name, piece in found:
                for start, target in wanted[name]:
                    _read(file, piece, start, target)


def _read(file: safe_open, piece: Piece, start: Sequence[int], target: torch.Tensor) -> None:
    """Copy what is both in `piece` and in the box `target`, which begins at `start`."""
    of_file, of_target = [], []
    for first, size, begin, extent in zip(
        piece.start, piece.shape, start, target.shape, strict=True
    ):
        low, high = max(first, begin), min(first + size, begin + extent)
        if low >= high:
            return
        of_file.append(slice(low - first, high - first))
        of_target.append(slice(low - begin, high - begin))
    source = file.get_slice(piece.name)
    num_ones = len(piece.shape) - len(source.get_shape())
    part = target[tuple(of_target)]
    part.copy_(source[tuple(of_file[num_ones:])])
    # A sum is cheap, and finite numbers may still overflow it.
    if not part.sum().isfinite() and not part.isfinite().all():
        raise ValueError(f"{piece.name} in {piece.path} must hold finite numbers, got NaN or inf")


def have_equal_bytes(path: Path, name: str, other_path: Path, other: str) -> bool:
    """Return whether two tensors of whole files have one dtype, one shape and the same bytes."""
    with open(path, "rb") as one, open(other_path, "rb") as another:
        kind = *_, num_bytes = _seek(one, name)
        if _seek(another, other) != kind:
            return False
        starts = range(0, num_bytes, COMPARED_BYTES)
        sizes = (min(COMPARED_BYTES, num_bytes - start) for start in starts)
        return all(one.read(size) == another.read(size) for size in sizes)


def _seek(file: BinaryIO, name: str) -> tuple[str, list[int], int]:
    """Go to where a tensor's bytes begin. Returns its dtype, its shape and their number."""
    (length,) = struct.unpack("<Q", file.read(8))
    entry = json.loads(file.read(length))[name]
    start, stop = entry["data_offsets"]
    file.seek(8 + length + start)
    return entry["dtype"], entry["shape"], stop - start


def _open(path: Path, framework: str) -> safe_open:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise ValueError(
            f"{path} must be a whole safetensors file, got {reason}: fetch it again"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint. Raises ValueError if one is missing or the index is
    damaged."""
    names = weight_names(folder)
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"the checkpoint {folder} must hold {name}, got a folder without it")
    return [folder / name for name in names]


def weight_names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files: the single one, or those that its index names. In a
    folder with both the single one is taken, as transformers does, and a warning says so. Raises
    ValueError if the index is damaged."""
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    weight_map = read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX_FILE} must have a weight_map, got {weight_map!r}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX_FILE} must name files beside it, got {name!r}")
    if names != [SINGLE_FILE] and (folder / SINGLE_FILE).is_file():
        words = "%s has two sets of weights: %s is read, and not what %s names"
        _warn_once(words % (folder, SINGLE_FILE, INDEX_FILE))
        return [SINGLE_FILE]
    return names


_warn_once = functools.cache(log.warning)
