"""The files that a run writes line by line (metrics, evaluations, archive), as far as a checkpoint
reaches.

Owns: measuring these files at a checkpoint, verifying and cutting them when a run resumes. Does not
own: what is in the lines. Invariant: a measured part ends with a whole line, and a resumed run
appends to bytes that are those it wrote.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from llamarl.json_file import parse

PATTERNS = ("metrics.jsonl", "evaluations.jsonl", "archive/*.jsonl")
MAX_PARTS = 64  # more are hashed again, as one part
PAGE_BYTES = 2**20

Parts = list[list[Any]]
"""Consecutive parts of a file: [byte where it ends, SHA-256 of the part in hexadecimal digits]."""


def measure(run_dir: str | Path) -> dict[str, int]:
    """The length of each file in bytes of whole lines, by its path in `run_dir`."""
    return {name: _whole_lines(path) for name, path in _files(run_dir).items()}


def digest(
    run_dir: str | Path, num_bytes: Mapping[str, int], before: Mapping[str, Parts]
) -> dict[str, Parts]:
    """The parts of each file up to `num_bytes`, after those of an earlier checkpoint, `before`.

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


def verify(run_dir: str | Path, saved: Mapping[str, Parts]) -> None:
    """ValueError, naming file and line, unless the files still begin with what was saved."""
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
    """Cut the files to what was saved. The run repeats what came after, so each rollout is in the
    archive once."""
    for name, path in _files(run_dir).items():
        end = saved[name][-1][0] if saved.get(name) else 0
        if path.stat().st_size > end:
            os.truncate(path, end)


def is_sound(saved: object) -> TypeGuard[dict[str, Parts]]:
    """True if `saved` has the form that `digest` gives."""
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
    """Bytes up to the end of the last whole line; another process may be writing the next one."""
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
    """(number, what is wrong) of the first line of a damaged part that is not a JSON object; of the
    part's first line if all are."""
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
