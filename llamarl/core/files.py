"""Files that a run reads or writes: JSON from outside, manifests of folders, and files that grow
line by line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

SURROGATE = "\\ud"  # begins the escape of half a character


def whole_letters(text: str) -> str:
    """Return the text with U+FFFD in place of each half of a character, which no encoding can hold;
    two halves that belong together become that character."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse(text: str | bytes) -> Any:
    """Return the value in `text`; ValueError says what is wrong, and at which column."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\u" in text and SURROGATE in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!r}"
        raise ValueError(f"{half}, half of a character, as text") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at column {error.start + 1}"
        raise ValueError(f"{place}, which is not UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"a mistake at {line}column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("lists or objects nested too deep") from None
    except ValueError:  # Python reads no whole number of more than 4300 digits
        raise ValueError("a number of too many digits") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file (reading a pipe would block); ValueError says what is
    wrong."""
    if not path.is_file():
        raise ValueError("no file" if not path.exists() else "something that is no file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"a file that cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`; ValueError if it holds anything else."""
    try:
        value = parse(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got a damaged file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_object(path: Path, value: Mapping[str, object]) -> None:
    """Replace `path` in one move by the JSON object `value`. ValueError for a number that is not
    finite."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(unfinished, path)


MANIFEST_FILE = "llamarl-manifest.json"
MAX_THREADS = 8  # more would wait for the disk

Digest = dict[str, Any]
"""The digest of one file: {"bytes": length, "sha256": 64 hexadecimal digits}."""


def write_part(folder: Path, part: int, paths: Iterable[Path]) -> None:
    """Hash some files of `folder`, which a rank wrote, for the manifest that `write` makes."""
    _write(folder / f"{MANIFEST_FILE}.part-{part:05d}", _digests(folder, paths))


def write(folder: Path) -> None:
    """Make the manifest of all files in `folder`; only files that are in no part are hashed
    here."""
    files: dict[str, Digest] = {}
    for part in sorted(folder.glob(f"{MANIFEST_FILE}.part-*")):
        files |= _read(part)
        part.unlink()
    names = {_name(folder, path): path for path in folder.rglob("*") if path.is_file()}
    missing = names.keys() - files.keys() - {MANIFEST_FILE}
    files |= _digests(folder, [names[name] for name in missing])
    _write(folder / MANIFEST_FILE, files)


def verify(folder: Path, *needed: str) -> None:
    """Raise ValueError, naming the file and what is wrong, unless all files are as the manifest
    says.

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
    """Call `verify` if there is a manifest: a checkpoint from Hugging Face has none."""
    if not os.path.lexists(folder / MANIFEST_FILE):
        return
    try:
        verify(folder)
    except ValueError as error:
        raise ValueError(f"{error}; if the change was meant, remove {MANIFEST_FILE}") from error


def _digests(folder: Path, paths: Iterable[Path]) -> dict[str, Digest]:
    """Return the digest of each file by name, hashed in threads."""
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
    """Return whether this is a name inside the folder, with a length and a hash."""
    is_inside = not name.startswith("/") and ".." not in PurePosixPath(name).parts
    kinds = {key: type(value) for key, value in digest.items()}
    return is_inside and kinds == {"bytes": int, "sha256": str}


PATTERNS = ("metrics.jsonl", "evaluations.jsonl", "archive/*.jsonl")
MAX_PARTS = 64  # more are hashed again, as one part
PAGE_BYTES = 2**20

Parts = list[list[Any]]
"""Consecutive parts of a file: [byte where it ends, SHA-256 of the part in hexadecimal digits]."""


def measure(run_dir: str | Path) -> dict[str, int]:
    """Return the length of each file in bytes of whole lines, by its path in `run_dir`."""
    return {name: _whole_lines(path) for name, path in _files(run_dir).items()}


def digest(
    run_dir: str | Path, num_bytes: Mapping[str, int], before: Mapping[str, Parts]
) -> dict[str, Parts]:
    """Return the parts of each file up to `num_bytes`, after those of an earlier checkpoint,
    `before`.

    Reads only what was written since then, so the cost of a save does not grow with the run.
    """
    parts = {}
    for name, end in num_bytes.items():
        old = before.get(name, [])
        start = old[-1][0] if old else 0
        if start > end or len(old) >= MAX_PARTS:
            old, start = [], 0
        new = [[end, _hash(Path(run_dir, name), start, end)]] if end > start else []
        parts[name] = [*old, *new]
    return parts


def verify_positions(run_dir: str | Path, saved: Mapping[str, Parts]) -> None:
    """Raise ValueError, naming file and line, unless the files still begin with what was saved."""
    files = _files(run_dir)
    for name, parts in saved.items():
        path = Path(run_dir, name)
        end = parts[-1][0] if parts else 0
        found = files[name].stat().st_size if name in files else 0
        if found < end:
            raise ValueError(f"{path} must be at least {end} bytes long, got {found}")
        for (start, _), (stop, expected) in pairwise([[0, ""], *parts]):
            if _hash(path, start, stop) != expected:
                line, what = _first_mistake(path, start, stop)
                raise ValueError(f"{path}:{line} must be as the run wrote it, got {what}")


def cut(run_dir: str | Path, saved: Mapping[str, Parts]) -> None:
    """Cut the files to their saved lengths. The run repeats what came after, so each rollout is in
    the archive once."""
    for name, path in _files(run_dir).items():
        end = saved[name][-1][0] if saved.get(name) else 0
        if path.stat().st_size > end:
            os.truncate(path, end)


def is_sound(saved: object) -> TypeGuard[dict[str, Parts]]:
    """Return whether `saved` has the form that `digest` gives."""
    return isinstance(saved, dict) and all(
        isinstance(parts, list)
        and all(isinstance(part, list) and list(map(type, part)) == [int, str] for part in parts)
        and all(start < end for (start, _), (end, _) in pairwise([[0, ""], *parts]))
        for parts in saved.values()
    )


def _files(run_dir: str | Path) -> dict[str, Path]:
    root = Path(run_dir)
    paths = [path for pattern in PATTERNS for path in sorted(root.glob(pattern))]
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}


def _whole_lines(path: Path) -> int:
    """Return the bytes up to the end of the last whole line; another process may be writing the
    next one."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - PAGE_BYTES)
            file.seek(start)
            if newline := file.read(end - start).rfind(b"\n") + 1:
                return start + newline
            end = start
    return 0


def _hash(path: Path, start: int, stop: int) -> str:
    sha256 = hashlib.sha256()
    for page in _pages(path, start, stop):
        sha256.update(page)
    return sha256.hexdigest()


def _pages(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (page := file.read(min(PAGE_BYTES, stop - start))):
            start += len(page)
            yield page


def _first_mistake(path: Path, start: int, stop: int) -> tuple[int, str]:
    """Return (number, what is wrong) of the first line of a damaged part that is not a JSON object;
    of the part's first line if all are JSON objects."""
    first = sum(page.count(b"\n") for page in _pages(path, 0, start)) + 1
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, start=first):
            if start >= stop:
                break
            start += len(line)
            try:
                value = parse(line.rstrip(b"\n"))
            except ValueError as error:
                return number, str(error)
            if not isinstance(value, dict):
                return number, type(value).__name__
    return first, f"other text there or in the lines after it, before line {number}"
