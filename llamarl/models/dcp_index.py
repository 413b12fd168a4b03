"""The index of a sharded checkpoint (`.metadata`, a pickle), read without running its code.

Owns: which classes the pickle may name, and the check of what it says. Does not own: the shards
(torch.distributed.checkpoint reads them, as tensors only). Invariant: unpickling calls only what
`_allowed` lists, so the worst that a folder of unknown origin can cause is an error.
"""

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from pickle import Unpickler
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

INDEX_FILE = ".metadata"
CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)


class SavedShards(FileSystemReader):
    """Reads a checkpoint folder that trainer ranks saved; ValueError if the index is missing,
    damaged or of another origin."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / INDEX_FILE
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            _check(index, path.parent)
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path} must be the index of a checkpoint, got {reason}") from None
        index.storage_meta.load_id = self.load_id
        return index

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the folder, by its name."""
        saved = self.read_metadata().state_dict_metadata
        return {name: tuple(getattr(entry, "size", ())) for name, entry in saved.items()}


def _allowed() -> Mapping[tuple[str, str], Callable[..., Any]]:
    classes: dict[tuple[str, str], Callable[..., Any]] = {
        (kind.__module__, kind.__qualname__): kind for kind in CLASSES
    }
    dtypes: dict[str, Any] = {k: v for k, v in vars(torch).items() if isinstance(v, torch.dtype)}
    paths = [("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")]  # Python 3.13's is the last
    return (
        classes
        | {("torch", name): dtype for name, dtype in dtypes.items()}
        | dict.fromkeys(paths, PurePosixPath)
        | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
    )


class _IndexUnpickler(Unpickler):
    ALLOWED = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise ValueError(f"{module}.{name}, which no trainer saves") from None


def _check(index: object, folder: Path) -> None:
    """ValueError unless every tensor's pieces lie in files of `folder`."""
    if not isinstance(index, metadata.Metadata):
        raise ValueError(f"an object of type {type(index).__name__}")
    if not isinstance(index.storage_meta, metadata.StorageMeta):
        raise ValueError("no record of its storage")
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str or not isinstance(entry, metadata.TensorStorageMetadata):
            raise ValueError(f"{name!r}, which is no tensor")
    sizes: dict[str, int] = {}
    for where, info in index.storage_data.items():
        name = info.relative_path
        if PurePosixPath(name).name != name:
            raise ValueError(f"a piece of {where.fqn} outside the folder, in {name}")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise ValueError(f"a piece of {where.fqn} past the end of {name}")
