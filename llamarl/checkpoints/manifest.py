"""The manifest of a folder: the size and SHA-256 of each of its files.

Owns: the manifest beside the files of a checkpoint or an export, and the check against it. Does not
own: what the files mean. Invariant: after `verify` every file that the manifest lists is bit for
bit what was written. Several files are hashed at a time (hashing releases the GIL).
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from llamarl.json_file import parse, read_bytes

MANIFEST_FILE = "llamarl-manifest.json"
MAX_THREADS = 8  # more would wait for the disk

Digest = dict[str, Any]
"""{"bytes": length, "sha256": 64 hexadecimal digits} of one file."""


def write_part(folder: Path, part: int, paths: Iterable[Path]) -> None:
    """Hash some files of `folder`, those that a rank wrote, for the manifest that `write` makes."""
    _write(folder / f"{MANIFEST_FILE}.part-{part:05d}", _digests(folder, paths))


def write(folder: Path) -> None:
    """Make the manifest of all files in `folder`; hashes only files that are in no part."""
    files: dict[str, Digest] = {}
    for part in sorted(folder.glob(f"{MANIFEST_FILE}.part-*")):
        files |= _read(part)
        part.unlink()
    names = {_name(folder, path): path for path in folder.rglob("*") if path.is_file()}
    missing = names.keys() - files.keys() - {MANIFEST_FILE}
    files |= _digests(folder, [names[name] for name in missing])
    _write(folder / MANIFEST_FILE, files)


def verify(folder: Path, *needed: str) -> None:
    """ValueError, naming the file and what is wrong, unless all files are as the manifest says.

    `needed` are names that the manifest must list; files that it does not list are ignored.
    """
    path = folder / MANIFEST_FILE
    files = _read(path)
    for name in needed:
        if name not in files:
            raise ValueError(f"{path} must list {name}, got {len(files)} other files")
    for name, saved in files.items():  # sizes first: quick
        each, num_bytes = folder / name, saved["bytes"]
        if not each.is_file():
            raise ValueError(f"{each} must be a file of {num_bytes} bytes, got none")
        if (found := each.stat().st_size) != num_bytes:
            raise ValueError(f"{each} must be {num_bytes} bytes long, got {found}")
    for name, got in _digests(folder, [folder / name for name in files]).items():
        if got != (saved := files[name]):
            raise ValueError(
                f"{folder / name} must hold the bytes that {MANIFEST_FILE} was made from (SHA-256 "
                f"{saved['sha256'][:12]}...), got others ({got['sha256'][:12]}...)"
            )


def verify_if_listed(folder: Path) -> None:
    """`verify`, if there is a manifest: a checkpoint from Hugging Face has none."""
    if not os.path.lexists(folder / MANIFEST_FILE):
        return
    try:
        verify(folder)
    except ValueError as error:
        raise ValueError(f"{error}; if the change was meant, remove {MANIFEST_FILE}") from error


def _digests(folder: Path, paths: Iterable[Path]) -> dict[str, Digest]:
    """Digest by name of each file, hashed in threads."""
    paths = sorted(paths)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(_digest, paths)
        return {_name(folder, path): digest for path, digest in zip(paths, digests, strict=True)}


def _digest(path: Path) -> Digest:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": file.tell(), "sha256": sha256}
    except OSError as error:
        raise ValueError(f"{path} must be readable, got {error.strerror}") from error


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _write(path: Path, files: dict[str, Digest]) -> None:
    path.write_text(json.dumps({"files": files}, indent=1, sort_keys=True) + "\n")


def _read(path: Path) -> dict[str, Digest]:
    got = "a damaged one"
    try:
        files = parse(read_bytes(path))["files"]
        if all(_is_sound(name, digest) for name, digest in files.items()):
            return dict(files)
    except ValueError as error:
        got = str(error)
    except (LookupError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} must be a manifest as llamarl writes it, got {got}")


def _is_sound(name: str, digest: Digest) -> bool:
    """A name inside the folder, a length and a hash."""
    is_inside = not name.startswith("/") and ".." not in PurePosixPath(name).parts
    kinds = {key: type(value) for key, value in digest.items()}
    return is_inside and kinds == {"bytes": int, "sha256": str}
