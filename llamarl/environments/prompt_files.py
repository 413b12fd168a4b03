"""Files of prompts: their rows, and pieces of them that several processes read.

Owns: the file formats (JSON lines, Parquet) and their errors, and where a file may be cut. Does not
own: what a row must hold (`prompts.py`). Invariant: the pieces of a source give the rows that its
files give one after another, with the same numbers.
"""

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.json_file import parse

PIECE_BYTES = 4 * 1024 * 1024  # of JSON lines
PIECE_ROWS = 25_000  # of a Parquet file
BLOCK_BYTES = 2**20

NumberedRow = tuple[int, dict[str, Any]]
"""A data row and its number, from 1: the line of a .jsonl file, or the place of any other row."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of a .jsonl file, or rows of a .parquet file, from `start` to `stop`; `line` counts its
    lines or rows before `start`, and `before` those of earlier files of the source."""

    path: str
    start: int
    stop: int
    line: int
    before: int

    def rows(self) -> Iterator[NumberedRow]:
        """Its rows, numbered as in its file; ValueError, naming file and line, if malformed."""
        path = Path(self.path)
        if path.suffix == ".jsonl":
            return _read_jsonl(path, self.start, self.stop, self.line)
        return _read_parquet(path, self.start, self.stop)


def check_files(files: Sequence[Path]) -> None:
    """ValueError unless these are files of a known format that exist."""
    for path in files:
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"a prompt file must end in .jsonl or .parquet, got {str(path)!r}")
        if not path.is_file():
            raise ValueError(f"the prompt file must exist, got {str(path)!r}")


def whole(path: Path) -> FilePiece:
    """A file that nothing is known of but that it exists, as one piece."""
    return FilePiece(str(path), 0, sys.maxsize, 0, 0)


def read_rows(path: Path) -> Iterator[NumberedRow]:
    """All rows of a .jsonl or .parquet file; ValueError, naming file and line, if malformed."""
    check_files([path])
    return whole(path).rows()


def cut_files(files: Sequence[Path]) -> list[FilePiece]:
    """The pieces of a source. ValueError for a file that is no readable Parquet file."""
    pieces: list[FilePiece] = []
    before = 0
    for path in files:
        cut = _cut_jsonl if path.suffix == ".jsonl" else _cut_parquet
        *places, (_, num_lines) = cut(path)
        stops = [*(start for start, _ in places[1:]), path.stat().st_size]
        if path.suffix == ".parquet":
            stops[-1] = num_lines
        for (start, line), stop in zip(places, stops, strict=True):
            pieces.append(FilePiece(str(path), start, stop, line, before))
        before += num_lines
    return pieces


def _cut_jsonl(path: Path) -> list[tuple[int, int]]:
    """(byte, lines before it) of the start of each piece, and of the end."""
    places, at, line = [(0, 0)], 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if at >= places[-1][0] + PIECE_BYTES and (end := block.find(b"\n")) >= 0:
                places.append((at + end + 1, line + 1))
            at += len(block)
            line += block.count(b"\n")
    return [*places, (at, line + 1)]


def _cut_parquet(path: Path) -> list[tuple[int, int]]:
    """(row, rows before it), as `_cut_jsonl`."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            num_rows = file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    return [(row, row) for row in (*range(0, max(1, num_rows), PIECE_ROWS), num_rows)]


def _read_jsonl(path: Path, start: int, stop: int, line_before: int) -> Iterator[NumberedRow]:
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, start=line_before + 1):
            if start >= stop:
                break
            start += len(line)
            if not line.strip():
                continue
            try:
                row = parse(line.removeprefix(BOM_UTF8).rstrip(b"\r\n"))
                if not isinstance(row, dict):
                    raise ValueError(shorten_value(row))
            except ValueError as error:
                must = f"{path}:{number}: the line must be a JSON object"
                raise ValueError(f"{must}, got {error}") from error
            yield number, row


def _read_parquet(path: Path, start: int, stop: int) -> Iterator[NumberedRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            row = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row + num_rows <= start or row >= stop:
                    row += num_rows
                    continue
                for batch in file.iter_batches(row_groups=[group]):
                    first, last = max(start - row, 0), min(stop - row, batch.num_rows)
                    if first < last:
                        some = batch.slice(first, last - first).to_pylist()
                        yield from enumerate(some, start=row + first + 1)
                    row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page is an OSError
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = str(error).splitlines()[0]
    return ValueError(f"{path} must be a readable Parquet file, got: {reason}")


def shorten_value(value: object) -> str:
    """It as JSON, at most 60 characters of it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
