"""Files of prompts (JSON lines, Parquet, Arrow) and folders of tasks: their rows, and pieces of
them that several processes read.

The pieces of a source give the rows that its files give one after another, with the same
numbers."""

import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.core.files import parse
from llamarl.model.messages import NumberedRow, shorten_value
from llamarl.scoring.agent.tasks import TASK_FILE, find_tasks, read_row

SUFFIXES = (".jsonl", ".parquet", ".arrow")
ARROW_MAGIC = b"ARROW1"  # begins a file of it, and not a stream
PIECE_BYTES = 4 * 1024 * 1024  # of JSON lines
PIECE_ROWS = 25_000  # of a Parquet or Arrow file
BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The bytes of a .jsonl file, or rows of any other, from `start` to `stop`; `line` counts its
    lines or rows before `start`, and `before` those of earlier files of the source. A task is one
    row."""

    path: str
    start: int = 0
    stop: int = sys.maxsize
    line: int = 0
    before: int = 0

    def rows(self) -> Iterator[NumberedRow]:
        """Yield its rows, numbered as in its file; ValueError, naming file and line, if
        malformed."""
        path = Path(self.path)
        if path.name == TASK_FILE:
            return iter([(1, read_row(path))])
        if path.suffix == ".jsonl":
            return _read_lines(path, self.start, self.stop, self.line)
        return _read_columns(path, self.start, self.stop)


def find_files(path: Path) -> list[Path]:
    """Return a file of prompts, or those of a folder in the order of their names; for a folder of
    tasks the file of each. ValueError unless they are of a known format and there."""
    if path.is_dir():
        if files := sorted(each for each in path.iterdir() if each.suffix in SUFFIXES):
            return files
        if tasks := find_tasks(path):
            return tasks
        must = f"hold {', '.join(SUFFIXES)} files, or folders of tasks with a {TASK_FILE}"
        raise ValueError(f"a folder of prompts must {must}, got {path}")
    if path.suffix not in SUFFIXES:
        must = "a prompt file must end in .jsonl, .parquet or .arrow"
        raise ValueError(f"{must}, got {str(path)!r}")
    if not path.is_file():
        raise ValueError(f"the prompt file must exist, got {str(path)!r}")
    return [path]


def read_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield all rows of a file, or of all that a folder has, numbered on; ValueError, naming file
    and line, if malformed."""
    files = find_files(path)
    pieces = cut_files(files) if len(files) > 1 else [FilePiece(str(files[0]))]
    return ((piece.before + number, row) for piece in pieces for number, row in piece.rows())


def cut_files(files: Sequence[Path]) -> list[FilePiece]:
    """Return the pieces of a source. ValueError for a file that is damaged."""
    pieces: list[FilePiece] = []
    before = 0
    for path in files:
        if path.name == TASK_FILE:
            places, stop, num_lines = [(0, 0)], 1, 1
        elif path.suffix == ".jsonl":
            *places, (stop, num_lines) = _cut_lines(path)
        else:
            with _arrow_errors(path):
                stop = num_lines = sum(num_rows for num_rows, _ in _row_blocks(path))
            places = [(row, row) for row in range(0, max(1, num_lines), PIECE_ROWS)]
        stops = [*(start for start, _ in places[1:]), stop]
        for (start, line), end in zip(places, stops, strict=True):
            pieces.append(FilePiece(str(path), start, end, line, before))
        before += num_lines
    return pieces


def _cut_lines(path: Path) -> list[tuple[int, int]]:
    """Return (byte, lines before it) of the start of each piece, and of the end."""
    places, at, line, last = [(0, 0)], 0, 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if at >= places[-1][0] + PIECE_BYTES and (end := block.find(b"\n")) >= 0:
                places.append((at + end + 1, line + 1))
            at, last = at + len(block), block[-1:]
            line += block.count(b"\n")
    return [*places, (at, line + (last != b"\n"))]


def _read_lines(path: Path, start: int, stop: int, line_before: int) -> Iterator[NumberedRow]:
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


def _read_columns(path: Path, start: int, stop: int) -> Iterator[NumberedRow]:
    with _arrow_errors(path):
        row = 0
        for num_rows, read in _row_blocks(path):
            if row >= stop:
                break
            if row + num_rows <= start:
                row += num_rows
                continue
            for batch in read():
                first, last = max(start - row, 0), min(stop - row, batch.num_rows)
                if first < last:
                    kinds = {field.name: field.type for field in batch.schema}
                    some = batch.slice(first, last - first).to_pylist()
                    for number, cells in enumerate(some, start=row + first + 1):
                        yield number, {key: _as_json(cells[key], kinds[key]) for key in cells}
                row += batch.num_rows


def _row_blocks(path: Path) -> Iterator[tuple[int, Callable[[], Iterable[Any]]]]:
    """Yield how many rows each row group of a Parquet file or batch of an Arrow file has, and what
    reads its batches. An Arrow file is a stream, as data sets are saved, or has a table of
    contents; it is mapped, so that batches that are passed over are not read."""
    import pyarrow
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                read = partial(file.iter_batches, row_groups=[group])
                yield file.metadata.row_group(group).num_rows, read
        return
    with pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
        file.seek(0)
        reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
        places = range(0 if is_stream else reader.num_record_batches)
        for batch in reader if is_stream else map(reader.get_batch, places):
            yield batch.num_rows, partial(iter, [batch])


def _as_json(cell: Any, kind: Any) -> Any:
    """Return a cell of this Arrow type as JSON has it. The records of a column all have the same
    keys, with nulls where a row had none, which are left out; a map becomes an object, whose keys
    are texts."""
    if not isinstance(cell, dict | list):
        return cell
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _as_json(cell, kind.value_type)
    if types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {key: _as_json(cell[key], kinds[key]) for key in cell if cell[key] is not None}
    if types.is_map(kind):
        return {str(key): _as_json(each, kind.item_type) for key, each in cell}
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # a list of any form
        return [_as_json(each, kind.value_type) for each in cell]
    return cell


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page is an OSError
        reason = (str(error).splitlines() or ["an empty file"])[0]
        kind = path.suffix[1:].capitalize()
        raise ValueError(f"{path} must be a readable {kind} file, got: {reason}") from error
