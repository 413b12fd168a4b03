"""Checkpoints in the Hugging Face layout, in and out.

Owns: streaming weights into memory (whole or one shard of each) and back to disk. Does not own:
which tensors there must be (`inventory.py`) or the bytes of one file (`safetensors_file.py`).
Invariant: no more memory than the target plus one tensor; a folder under its final name is
complete.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from llamarl.checkpoints import manifest
from llamarl.json_file import read_object
from llamarl.models.architecture import read_architecture
from llamarl.models.inventory import INDEX_FILE, SINGLE_FILE, locate, parameter_shapes
from llamarl.models.safetensors_file import FileReader, FileWriter

MAX_SHARD_BYTES = 4 * 10**9
MODEL_FILES = ("generation_config.json", "LICENSE*", "NOTICE*")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates",
)
"""What an export takes over, beside config.json: from the checkpoint, and from the tokenizer."""


@torch.no_grad()
def load_into(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Copy the checkpoint's weights into `tensors` (all parameters, by name), casting each.

    A DTensor gets its rank's shard, and only that part of the file is read, a few megabytes at a
    time. Raises ValueError like `check_checkpoint`, if `tensors` does not fit, or if a
    weight is not finite.
    """
    architecture = read_architecture(folder)
    expected = parameter_shapes(architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"{name} of the model must have the shape that {folder} says, "
                f"{expected.get(name)}, got {shapes.get(name)}"
            )
    names_by_file: dict[Path, list[str]] = {}
    for name, path in locate(Path(folder), expected, architecture).items():
        names_by_file.setdefault(path, []).append(name)
    for path, names in names_by_file.items():
        with FileReader(path) as file:
            for name in names:
                local = _fill(tensors[name], name, file)
                if not local.sum().isfinite() and not local.isfinite().all():
                    raise ValueError(f"{name} in {path} must hold finite numbers, got NaN or inf")


def _fill(target: torch.Tensor, name: str, file: FileReader) -> torch.Tensor:
    """Fill `target`, a DTensor's local part with its own box of the file; returns what was
    filled."""
    start: Sequence[int] = (0,) * target.ndim
    if isinstance(target, DTensor):
        (chunk,) = target.__create_chunk_list__()  # torch's own offsets: strided shards too
        target, start = target.to_local(), chunk.offsets
    file.read(name, start, target)
    return target


def save(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source_folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all parameters in `dtype` as a checkpoint that transformers loads.

    `tensors` may come in any order; each is written as it comes. config.json (with `dtype`) is
    that of `source_folder`, the tokenizer's files are those of `tokenizer_folder` (None: the same).
    Files hold at most `max_shard_bytes` of tensors, or one larger tensor; a manifest lists them
    all. A folder that stands at `folder` is replaced only when the new one is complete. Raises
    ValueError for an unknown name or a wrong shape, RuntimeError if a parameter never came, OSError
    if the disk is full.
    """
    source = Path(source_folder)
    shapes = parameter_shapes(read_architecture(source))
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with _replacing(Path(folder)) as unfinished:
        _check_space(unfinished, num_bytes)
        _copy_files(source, MODEL_FILES, unfinished)
        _copy_files(Path(tokenizer_folder or source), TOKENIZER_FILES, unfinished)
        _write_config(source, unfinished, dtype)
        with ExitStack() as stack:
            writers: dict[str, FileWriter] = {}
            for path, part in _plan_files(unfinished, shapes, dtype, max_shard_bytes):
                writer = stack.enter_context(FileWriter(path, part, dtype))
                writers |= dict.fromkeys(part, writer)
            for name, tensor in tensors:
                if name not in writers:
                    must = "tensors to save must be the model's parameters"
                    raise ValueError(f"{must}, got {name!r}")
                writers[name].write(name, tensor)
        manifest.write(unfinished)


def _plan_files(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> list[tuple[Path, dict[str, tuple[int, ...]]]]:
    """Split the parameters over files in their order; writes the index if there are several."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    filled_bytes = total_bytes = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if parts[-1] and filled_bytes + num_bytes > max_shard_bytes:
            parts.append({})
            filled_bytes = 0
        parts[-1][name] = shape
        filled_bytes += num_bytes
        total_bytes += num_bytes
    if len(parts) == 1:
        return [(folder / SINGLE_FILE, parts[0])]
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [(folder / file, part) for file, part in zip(files, parts, strict=True)]


def _copy_files(source: Path, patterns: Iterable[str], folder: Path) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    config = read_object(source / "config.json")
    # The old spelling is read by every version of transformers, the new one by new ones.
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_space(folder: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        message = f"{os.strerror(errno.ENOSPC)}: the weights need {num_bytes} bytes"
        raise OSError(errno.ENOSPC, f"{message}, {free_bytes} are free", str(folder.parent))


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its place if the block succeeds."""
    folder = folder.absolute()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    _put_back(replaced, folder)  # a save may have been killed between the two renames below
    for stale in (unfinished, replaced):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
    except BaseException:
        _put_back(replaced, folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _put_back(replaced: Path, folder: Path) -> None:
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
