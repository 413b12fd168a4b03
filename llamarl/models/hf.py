"""Checkpoints in the Hugging Face layout, in and out.

Owns: which tensors a checkpoint must hold, the checks before a run, streaming them into memory
(whole or one shard of each) and back to disk. Does not own: the bytes of one file
(`safetensors_file.py`) or config.json's meaning (`architecture.py`). Invariant: no more memory than
the target plus one tensor; a folder under its final name is complete.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from llamarl.models.architecture import Architecture, read_architecture, read_object
from llamarl.models.safetensors_file import DTYPES, Entry, FileWriter, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # old Llama files store this constant
MAX_SHARD_BYTES = 4 * 10**9
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates",
    "LICENSE*",
    "NOTICE*",
)
"""What an export takes over from the checkpoint it started from, beside config.json."""


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the order of the layers."""
    hidden_size, vocab_size = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for i in range(architecture.num_layers):
        for name, shape in _layer_shapes(architecture).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden_size,)
    if not architecture.tie_embeddings:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return shapes


def _layer_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    a = architecture
    q_size, kv_size = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    linears = {
        "self_attn.q_proj": (q_size, a.hidden_size, a.attention_bias),
        "self_attn.k_proj": (kv_size, a.hidden_size, a.attention_bias),
        "self_attn.v_proj": (kv_size, a.hidden_size, a.attention_bias),
        "self_attn.o_proj": (a.hidden_size, q_size, a.output_bias),
        "mlp.gate_proj": (a.intermediate_size, a.hidden_size, a.mlp_bias),
        "mlp.up_proj": (a.intermediate_size, a.hidden_size, a.mlp_bias),
        "mlp.down_proj": (a.hidden_size, a.intermediate_size, a.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (a.hidden_size,)}
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    if a.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (a.head_dim,)
    shapes["post_attention_layernorm.weight"] = (a.hidden_size,)
    return shapes


def check_checkpoint(folder: str | Path) -> Architecture:
    """Check everything that file headers tell, without reading weights: before a run starts.

    Returns the architecture. Raises ValueError naming the file or tensor if a file is missing,
    truncated or quantised, or if names or shapes do not fit config.json.
    """
    architecture = read_architecture(folder)
    _locate(Path(folder), parameter_shapes(architecture), architecture)
    return architecture


@torch.no_grad()
def load_into(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Copy the checkpoint's weights into `tensors` (all parameters, by name), casting each.

    A DTensor gets its rank's shard, and only that part of the file is read. One tensor is in
    flight at a time. Raises ValueError like `check_checkpoint`, or if `tensors` does not fit.
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
    for name, path in _locate(Path(folder), expected, architecture).items():
        names_by_file.setdefault(path, []).append(name)
    for path, names in names_by_file.items():
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                _copy(tensors[name], file.get_slice(name))


def _copy(target: torch.Tensor, source: object) -> None:
    """Fill `target` from a lazy slice of a file: a DTensor's local part from its own box."""
    if not isinstance(target, DTensor):
        target.copy_(source[...])  # type: ignore[index]
        return
    local = target.to_local()
    (chunk,) = target.__create_chunk_list__()  # torch's own offsets, right for strided shards too
    if local.numel():
        box = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        local.copy_(source[box])  # type: ignore[index]


def _locate(
    folder: Path, expected: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> dict[str, Path]:
    """Parameter name -> its file, after every check that headers allow."""
    entries: dict[str, tuple[Path, Entry]] = {}
    for path in _weight_files(folder):
        for name, entry in read_header(path).items():
            entries[name] = (path, entry)
    ignored = {"lm_head.weight"} if architecture.tie_embeddings else set()
    extra = [
        name
        for name in entries.keys() - expected.keys() - ignored
        if not name.endswith(IGNORED_SUFFIX)
    ]
    if extra:
        raise ValueError(
            f"{folder} must hold only the tensors that its config.json implies, got {min(extra)} "
            f"({len(extra)} such tensors)"
        )
    for name, shape in expected.items():
        if name not in entries:
            raise ValueError(f"{folder} must hold the tensor {name}, got files without it")
        path, entry = entries[name]
        if entry.shape != shape:
            raise ValueError(
                f"{name} in {path} must have shape {shape} as config.json says, got {entry.shape}"
            )
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{name} in {path} must be one of {', '.join(DTYPES)}, got {entry.dtype}"
            )
    return {name: entries[name][0] for name in expected}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        index = read_object(folder / INDEX_FILE)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX_FILE} must have a weight_map, got {weight_map!r}")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE_FILE]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX_FILE} must name files beside it, got {name!r}")
        if not (folder / name).is_file():
            raise ValueError(f"the checkpoint {folder} must hold {name}, got a folder without it")
    return [folder / name for name in names]


def save(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source_folder: str | Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all parameters in `dtype` as a checkpoint that transformers loads.

    `tensors` may come in any order; each is written as it comes. config.json (with `dtype`) and
    the tokenizer's files are those of `source_folder`. Files hold at most `max_shard_bytes` of
    tensors, or one larger tensor. A folder that stands at `folder` is replaced only when the new
    one is complete. Raises ValueError for an unknown name or a wrong shape, RuntimeError if a
    parameter never came, OSError if the disk is full.
    """
    source = Path(source_folder)
    shapes = parameter_shapes(read_architecture(source))
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with _replacing(Path(folder)) as unfinished, ExitStack() as stack:
        _check_space(unfinished, num_bytes)
        _copy_files(source, unfinished, dtype)
        writers: dict[str, FileWriter] = {}
        for path, part in _plan_files(unfinished, shapes, dtype, max_shard_bytes):
            writer = stack.enter_context(FileWriter(path, part, dtype))
            writers |= dict.fromkeys(part, writer)
        for name, tensor in tensors:
            if name not in writers:
                raise ValueError(f"tensors to save must be the model's parameters, got {name!r}")
            writers[name].write(name, tensor)


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


def _copy_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)
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
