"""The span file of a process, `<process>.jsonl`: its lines, and how it is read.

Owns: the file format. Does not own: when spans are written (`span.py`) or summed
(`span_history.py`). Invariant: every line is one span, an origin or the head line; any other line
is skipped.

An origin line converts the process's clock to Unix time; it begins a session, unless it is marked
as the same session's. When old spans are summed, a new file replaces the old one: a head line, the
sums, and the spans that are kept as they were recorded. The head line gives the length of the
head (itself and the sums), and how many bytes of the spans recorded since the start are in the
sums.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

COUNTS = {"tokens", "rows", "spans"}  # what is added up over spans
BYTES = "bytes"  # by column: added up too
MAX_NS = 2**63  # three centuries
ORIGIN = b"unix_minus_monotonic_ns"


class Span(NamedTuple):
    """One finished span as read back; times are Unix nanoseconds, so processes compare.

    `session` counts the starts of the process within one run folder, from 0.
    """

    session: int
    name: str
    cat: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]

    @property
    def is_sum(self) -> bool:
        """True if this stands for several spans of one name, with the sum of their lengths,
        counts and bytes."""
        return "spans" in self.args


class SpanReader:
    """Reads one process's file while it grows: every `read` continues where the last one ended.

    Spans that were summed between two reads are not read again as sums.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is that of `<process>.jsonl`, whether it exists or not."""
        self.path = Path(path)
        self.process = self.path.stem
        self._parser = SpanParser()
        self._num_summed: int | None = None  # bytes; a new file has a new number
        self._first_kept = 0  # offset in the file of the spans that are not summed
        self._offset = 0  # in the file, of the first line not seen
        self._known_until = 0  # offset in the file up to which an earlier file was read

    def read(self) -> Iterator[Span]:
        """Spans not read yet, in the order they were recorded (by their end, nearly)."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            num_summed, head_bytes = read_head(file)
            if num_summed != self._num_summed:
                self._enter(num_summed, head_bytes)
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break  # still being written
                is_new = self._offset >= self._known_until
                self._offset += len(text)
                if is_new or ORIGIN in text:
                    span = self._parser.parse(text)
                    if span is not None and is_new:
                        yield span

    def _enter(self, num_summed: int, head_bytes: int) -> None:
        """Start a file that replaces the one read until now, if any."""
        if self._num_summed is not None:
            num_read = self._num_summed + self._offset - self._first_kept
            self._known_until = head_bytes + max(0, num_read - num_summed)
        self._num_summed, self._first_kept, self._offset = num_summed, head_bytes, 0
        self._parser = SpanParser()


class SpanParser:
    """Turns the lines of one file, in order, into spans."""

    def __init__(self) -> None:
        self.session = -1
        self.unix_minus_monotonic_ns = 0

    def parse(self, text: bytes) -> Span | None:
        """The span in a line; None if the line is something else or damaged."""
        try:
            return self._span(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def _span(self, line: dict[str, Any]) -> Span | None:
        if "cat" not in line:
            if "unix_minus_monotonic_ns" in line:
                self.unix_minus_monotonic_ns = _whole(line["unix_minus_monotonic_ns"])
                self.session += not line.get("goes_on") or self.session < 0
            return None
        start_ns = _whole(line.pop("start_ns")) + self.unix_minus_monotonic_ns
        end_ns = _whole(line.pop("end_ns")) + self.unix_minus_monotonic_ns
        name, cat = line.pop("name"), line.pop("cat")
        if type(name) is not str or type(cat) is not str:
            raise TypeError(name)
        for count in line.keys() & COUNTS:
            _whole(line[count])
        if isinstance(line.get(BYTES), dict):
            for size in line[BYTES].values():
                _whole(size)
        return Span(self.session, name, cat, start_ns, end_ns, line)


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= abs(number) < MAX_NS:
        raise ValueError(f"a time or count must be a whole number, got {number!r}")
    return number


def head_line(num_summed: int, head_bytes: int) -> str:
    """The head line, whose own length does not depend on the numbers."""
    return f'{{"summed_bytes": {num_summed:15d}, "head_bytes": {head_bytes:15d}}}\n'


def read_head(file: BinaryIO) -> tuple[int, int]:
    """(bytes of the spans that were summed, length of the head); 0, 0 if none were."""
    try:
        head = json.loads(file.readline(len(head_line(0, 0))))
        return int(head["summed_bytes"]), int(head["head_bytes"])
    except (ValueError, TypeError, KeyError):
        return 0, 0


def span_files(folder: str | Path) -> list[Path]:
    """`<process>.jsonl` of every process, in a stable order."""
    return sorted(Path(folder).glob("*.jsonl"))
