"""Files of prompts: their rows, and pieces of them that several processes read.

The pieces of a source give the rows that its files give one after another, with the same
numbers."""

import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.core.files import parse
from llamarl.model.messages import NumberedRow, shorten_value

ARROW_MAGIC = b"ARROW1"  # begins a file of it, and not a stream
PIECE_BYTES = 4 * 1024 * 1024  # of JSON lines
PIECE_ROWS = 25_000  # of a Parquet or Arrow file
BLOCK_BYTES = 2**20

Places = tuple[list[tuple[int, int]], tuple[int, int]]
"""(byte or row, lines or rows before it) of the start of each piece; the same of the end."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of a .jsonl file, or rows of any other, from `start` to `stop`; `line` counts its lines
    or rows before `start`, and `before` those of earlier files of the source."""

    path: str
    start: int
    stop: int
    line: int
    before: int

    def rows(self) -> Iterator[NumberedRow]:
        """Its rows, numbered as in its file; ValueError, naming file and line, if malformed."""
        path = Path(self.path)
        return FORMATS[path.suffix].read(path, self.start, self.stop, self.line)


def find_files(path: Path) -> list[Path]:
    """A file of prompts, or those of a folder in the order of their names. ValueError unless they
    are of a known format and there."""
    if path.is_dir():
        if files := sorted(each for each in path.iterdir() if each.suffix in FORMATS):
            return files
        raise ValueError(f"a folder of prompts must hold {', '.join(FORMATS)} files, got {path}")
    if path.suffix not in FORMATS:
        must = "a prompt file must end in .jsonl, .parquet or .arrow"
        raise ValueError(f"{must}, got {str(path)!r}")
    if not path.is_file():
        raise ValueError(f"the prompt file must exist, got {str(path)!r}")
    return [path]


def whole(path: Path) -> FilePiece:
    """A file that nothing is known of but that it exists, as one piece."""
    return FilePiece(str(path), 0, sys.maxsize, 0, 0)


def read_rows(path: Path) -> Iterator[NumberedRow]:
    """All rows of a file, or of all that a folder has, numbered on; ValueError, naming file and
    line, if malformed."""
    files = find_files(path)
    pieces = cut_files(files) if len(files) > 1 else [whole(files[0])]
    return ((piece.before + number, row) for piece in pieces for number, row in piece.rows())


def cut_files(files: Sequence[Path]) -> list[FilePiece]:
    """The pieces of a source. ValueError for a file that is damaged."""
    pieces: list[FilePiece] = []
    before = 0
    for path in files:
        places, (stop, num_lines) = FORMATS[path.suffix].cut(path)
        stops = [*(start for start, _ in places[1:]), stop]
        for (start, line), end in zip(places, stops, strict=True):
            pieces.append(FilePiece(str(path), start, end, line, before))
        before += num_lines
    return pieces


def _cut_jsonl(path: Path) -> Places:
    places, at, line, last = [(0, 0)], 0, 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if at >= places[-1][0] + PIECE_BYTES and (end := block.find(b"\n")) >= 0:
                places.append((at + end + 1, line + 1))
            at, last = at + len(block), block[-1:]
            line += block.count(b"\n")
    return places, (at, line + (last != b"\n"))


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


def _cut_parquet(path: Path) -> Places:
    from pyarrow import parquet

    with _arrow_errors(path, "Parquet"), parquet.ParquetFile(path) as file:
        return _cut_rows(file.metadata.num_rows)


def _read_parquet(path: Path, start: int, stop: int, _: int) -> Iterator[NumberedRow]:
    from pyarrow import parquet

    with _arrow_errors(path, "Parquet"), parquet.ParquetFile(path) as file:
        row = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if row + num_rows <= start or row >= stop:
                row += num_rows
                continue
            for batch in file.iter_batches(row_groups=[group]):
                yield from _rows_between(batch, row, start, stop)
                row += batch.num_rows


def _cut_arrow(path: Path) -> Places:
    with _arrow_errors(path, "Arrow"):
        return _cut_rows(sum(batch.num_rows for batch in _arrow_batches(path)))


def _read_arrow(path: Path, start: int, stop: int, _: int) -> Iterator[NumberedRow]:
    with _arrow_errors(path, "Arrow"):
        row = 0
        for batch in _arrow_batches(path):
            if row >= stop:
                break
            yield from _rows_between(batch, row, start, stop)
            row += batch.num_rows


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Of both forms: a stream, as data sets are saved, and a file with a table of contents. They
    are mapped, so that those which are passed over are not read."""
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
        file.seek(0)
        reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
        yield from reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))


def _cut_rows(num_rows: int) -> Places:
    return [(row, row) for row in range(0, max(1, num_rows), PIECE_ROWS)], (num_rows, num_rows)


def _rows_between(batch: Any, row: int, start: int, stop: int) -> Iterator[NumberedRow]:
    """Those of a batch, which has `row` rows before it, that are among `start` to `stop`."""
    first, last = max(start - row, 0), min(stop - row, batch.num_rows)
    if first < last:
        read = _reader(batch.schema)
        some = batch.slice(first, last - first).to_pylist()
        yield from enumerate(map(read, some), start=row + first + 1)


def _reader(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What makes rows as JSON has them of those of a batch."""
    cells = {field.name: _cell_reader(field.type) for field in schema}
    return lambda row: {key: cells[key](each) for key, each in row.items()}


def _cell_reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value as JSON has it of one of this Arrow type. The records of a column all have
    the same keys, with nulls where a row had none, which are left out; a map becomes an object,
    whose keys are texts."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _cell_reader(kind.value_type)
    if types.is_struct(kind):
        keys = {field.name: _cell_reader(field.type) for field in kind}
        return _unless_null(
            lambda cell: {key: keys[key](each) for key, each in cell.items() if each is not None}
        )
    if types.is_map(kind):
        item = _cell_reader(kind.item_type)
        return _unless_null(lambda cell: {str(key): item(each) for key, each in cell})
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # a list of any form
        each_of = _cell_reader(kind.value_type)
        return _unless_null(lambda cell: [*map(each_of, cell)])
    return _as_it_is


def _unless_null(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda cell: None if cell is None else read(cell)


def _as_it_is(cell: Any) -> Any:
    return cell


@contextmanager
def _arrow_errors(path: Path, kind: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page is an OSError
        reason = (str(error).splitlines() or ["an empty file"])[0]
        raise ValueError(f"{path} must be a readable {kind} file, got: {reason}") from error


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How a file is cut, and how a piece of it is read: (path, start, stop, line) -> rows."""

    cut: Callable[[Path], Places]
    read: Callable[[Path, int, int, int], Iterator[NumberedRow]]


FORMATS = {
    ".jsonl": FileFormat(_cut_jsonl, _read_jsonl),
    ".parquet": FileFormat(_cut_parquet, _read_parquet),
    ".arrow": FileFormat(_cut_arrow, _read_arrow),
}
"""By the ending of a file."""
