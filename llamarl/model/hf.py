"""Reading and writing checkpoints in the Hugging Face layout.

Reading takes no memory beside the target, writing that of one file; a folder under its final name
is complete."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from llamarl.core import files
from llamarl.core.files import read_object
from llamarl.model.architecture import AnyArchitecture, read_any_architecture
from llamarl.model.inventory import file_pieces, locate, parameter_shapes
from llamarl.model.safetensors_file import INDEX_FILE, FileBox, read_boxes
from llamarl.model.tokenizer import END_FILE, TOKENIZER_FILES, copy_files

Index = tuple[int | slice, ...]
MAX_SHARD_BYTES = 2 * 10**9  # of host memory too: a file is written once it has all its tensors
MODEL_FILES = (END_FILE, "LICENSE*", "NOTICE*")
"""The files of the checkpoint that an export copies, beside config.json and the tokenizer."""


@torch.no_grad()
def load_into(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Copy the checkpoint's weights into `tensors` (all parameters, by name), casting each.

    A DTensor gets its rank's shard. Raises ValueError like `check_checkpoint`, if `tensors` does
    not fit, or if a weight is not finite."""
    architecture = read_any_architecture(folder)
    expected = parameter_shapes(architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"{name} of the model must have the shape that it has in {folder}, "
                f"{expected.get(name)}, got {shapes.get(name)}"
            )
    read_boxes(locate(Path(folder), architecture), lambda name: [local_box(tensors[name])])


def as_parameters(
    source: torch.nn.Module | Mapping[str, torch.Tensor], architecture: AnyArchitecture
) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, or of its state_dict, by their names in this layout;
    contiguous.

    Raises ValueError, naming the first that is wrong, unless they are `architecture`'s
    parameters."""
    found = dict(source.state_dict() if isinstance(source, torch.nn.Module) else source)
    head = found.pop("lm_head.weight", None) if architecture.tie_embeddings else None
    tied = found.get("model.embed_tokens.weight")
    if head is not None and tied is not None and not torch.equal(head, tied):
        must = "lm_head.weight of source must equal model.embed_tokens.weight"
        raise ValueError(f"{must}, to which the checkpoint ties it, got another matrix")
    shapes = parameter_shapes(architecture)
    for name in sorted(found.keys() ^ shapes.keys()):
        if name in shapes:
            raise ValueError(f"source must have the parameter {name}, got none")
        raise ValueError(f"source must have no parameters but the checkpoint's, got {name}")
    for name, shape in shapes.items():
        tensor = found[name]
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{name} of source must be a plain tensor, got {type(tensor).__name__}"
            )
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of source must have shape {shape}, got {tuple(tensor.shape)}")
    return {name: found[name].detach().contiguous() for name in shapes}


def local_box(target: torch.Tensor) -> FileBox:
    """Return where in the file `target` begins, and its memory; for a DTensor its rank's part."""
    if not isinstance(target, DTensor):
        return (0,) * target.ndim, target
    (chunk,) = target.__create_chunk_list__()  # torch's own offsets: strided shards too
    return chunk.offsets, target.to_local()


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

    `tensors` may be in any order; in the order of the layers, forwards or backwards, no more than
    one file's are held. config.json (with `dtype`) is that of `source_folder`, the tokenizer's
    files are those of `tokenizer_folder` (None: the same). Files hold at most `max_shard_bytes` of
    tensors, or one larger tensor; a manifest lists them all. An existing `folder` is replaced only
    when the new one is complete. Raises ValueError for an unknown name or a wrong shape,
    RuntimeError if a parameter is missing, OSError if the disk is full."""
    source = Path(source_folder)
    architecture = read_any_architecture(source)
    num_elements = sum(map(math.prod, parameter_shapes(architecture).values()))
    with replacing(Path(folder)) as unfinished:
        check_space(unfinished.parent, num_elements * dtype.itemsize, "the weights need")
        copy_files(source, MODEL_FILES, unfinished)
        copy_files(Path(tokenizer_folder or source), TOKENIZER_FILES, unfinished)
        config = read_object(source / "config.json")
        # The old spelling is read by every version of transformers, the new one by new ones.
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(config, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        _write_weights(unfinished, tensors, architecture, dtype, max_shard_bytes)
        files.write(unfinished)


def _write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    architecture: AnyArchitecture,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write each file when its last tensor has come, and the index if there are several. Stacked
    experts become a matrix for each."""
    shapes, parts = parameter_shapes(architecture), dict[str, list[tuple[str, Index]]]()
    empty: dict[str, torch.Tensor] = {}
    for name, tensor, start, size, file_shape in file_pieces(architecture):
        rest = (slice(a, a + b) for a, b in zip(start[1:], size[1:], strict=True))
        place: Index = () if file_shape == size else (start[0], *rest)
        parts.setdefault(name, []).append((tensor, place))
        empty[tensor] = torch.empty(file_shape, dtype=dtype, device="meta")
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_bytes)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    held: dict[str, dict[str, torch.Tensor]] = {file: {} for file in split.filename_to_tensors}
    missing = set(shapes)
    for name, whole in tensors:
        if name not in missing:
            raise ValueError(
                f"tensors to save must be the model's parameters, each once, got {name!r}"
            )
        if tuple(whole.shape) != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(whole.shape)}")
        missing.remove(name)
        for tensor, place in parts[name]:
            file = split.tensor_to_filename[tensor]
            part = whole.detach()[place].to(device="cpu", dtype=dtype).contiguous()
            is_view = place != () and part.data_ptr() == whole[place].data_ptr()
            held[file][tensor] = part.clone() if is_view else part
            if len(held[file]) == len(split.filename_to_tensors[file]):
                write_file(folder / file, held.pop(file))
    if missing:
        raise RuntimeError(f"tensors to save must be all parameters, got none of {sorted(missing)}")


def write_file(path: Path, tensors: dict[str, torch.Tensor], beside: str = "config.json") -> None:
    """Write one safetensors file and flush it to disk; it gets the permissions of the file `beside`
    it. Raises OSError if there is no room."""
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    shutil.copymode(path.with_name(beside), path)  # else its owner alone could read it
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check_space(folder: str | Path, num_bytes: int, needs: str) -> None:
    """Raise OSError (ENOSPC) unless the disk of `folder` has room for `num_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        message = f"{os.strerror(errno.ENOSPC)}: {needs} {num_bytes} bytes, {free_bytes} are free"
        raise OSError(errno.ENOSPC, message, str(folder))


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder` that takes its place if the block succeeds."""
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
