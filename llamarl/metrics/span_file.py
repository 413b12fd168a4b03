"""The span files of a process: their names, their lines, and how they are read.

Owns: the file format. Does not own: when spans are written (`span.py`) or summed
(`span_history.py`). Invariant: every line is one span, an origin, or the head of a past file; what
is no whole line is skipped.

A process writes `<process>.jsonl`. When that is full it becomes `<process>.jsonl.1`, then `.2` and
so on, and the oldest of these are summed into `<process>.jsonl.past`. An origin line leads from the
process's clock to Unix time; it begins a session, unless it says that the session goes on. The head
of a past file says up to which number files are in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PAST = ".past"
COUNTS = {"tokens", "spans"}  # what is added up over spans
MAX_NS = 2**63  # three centuries


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
        """True if this stands for several spans of one name, as long as they together."""
        return "spans" in self.args


class SpanReader:
    """Reads one process's files, also while they grow: every `read` goes on where the last ended.

    What was summed between two reads is not read again.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is that of `<process>.jsonl`, whether it exists or not."""
        self.path = Path(path)
        self.process = self.path.stem
        self._inode: int | None = None
        self._num_bytes_read = 0
        self._parser = _Parser()

    def read(self) -> Iterator[Span]:
        """Spans not read yet, in the order they were recorded (by their end, nearly)."""
        for path in self._unread():
            with suppress(FileNotFoundError), path.open("rb") as file:  # summed just now
                inode = path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._num_bytes_read = inode, 0
                file.seek(self._num_bytes_read)
                for text in file:
                    if not text.endswith(b"\n"):
                        break  # still being written
                    self._num_bytes_read += len(text)
                    span = self._parser.parse(text)
                    if span is not None:
                        yield span

    def _unread(self) -> list[Path]:
        """The files from the one on that the last read ended in."""
        if self._inode is not None and _inode(self.path) == self._inode:
            return [self.path]
        paths = files_of(self.path)
        inodes = [_inode(path) for path in paths]
        if self._inode in inodes[:-1]:
            return paths[inodes.index(self._inode) :]
        is_first = self._inode is None
        return [path for path in paths if is_first or path.suffix != PAST]


class _Parser:
    """Lines to spans, for the files of one process in order."""

    def __init__(self) -> None:
        self._session = -1
        self._unix_minus_monotonic_ns = 0

    def parse(self, text: bytes) -> Span | None:
        try:
            return self._span(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # mixed-version or damaged

    def _span(self, line: dict[str, Any]) -> Span | None:
        if "cat" not in line:
            if "unix_minus_monotonic_ns" in line:
                self._unix_minus_monotonic_ns = _whole(line["unix_minus_monotonic_ns"])
                self._session += not line.get("goes_on") or self._session < 0
            return None
        offset_ns = self._unix_minus_monotonic_ns
        start_ns = _whole(line.pop("start_ns")) + offset_ns
        end_ns = _whole(line.pop("end_ns")) + offset_ns
        name, cat = line.pop("name"), line.pop("cat")
        if type(name) is not str or type(cat) is not str:
            raise TypeError(name)
        for count in line.keys() & COUNTS:
            _whole(line[count])
        return Span(self._session, name, cat, start_ns, end_ns, line)


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= abs(number) < MAX_NS:
        raise ValueError(f"a time or count must be a whole number, got {number!r}")
    return number


def parse_files(paths: Iterable[Path]) -> Iterator[Span]:
    """The spans of these files of one process, in order."""
    parser = _Parser()
    for path in paths:
        with path.open("rb") as file:
            for text in file:
                span = parser.parse(text)
                if span is not None:
                    yield span


def span_files(folder: str | Path) -> list[Path]:
    """`<process>.jsonl` of every process, in a stable order: what a SpanReader is made of."""
    names = {path.name.partition(".jsonl")[0] for path in Path(folder).glob("*.jsonl*")}
    return [Path(folder, f"{name}.jsonl") for name in sorted(names)]


def files_of(path: Path) -> list[Path]:
    """The files that there are of `<process>.jsonl`, the oldest first."""
    past, num_past = past_of(path)
    paths = [past] if past.exists() else []
    return [*paths, *full_files(path, num_past), *([path] if path.exists() else [])]


def full_files(path: Path, num_past: int = 0) -> list[Path]:
    """Those of `<process>.jsonl` that are full and not among the `num_past` summed, by number."""
    numbered = [(int(p.suffix[1:]), p) for p in path.parent.glob(f"{path.name}.[0-9]*")]
    return [full for number, full in sorted(numbered) if number > num_past]


def past_of(path: Path) -> tuple[Path, int]:
    """The past file of `<process>.jsonl`, and the number of the last file summed in it."""
    past = path.with_name(path.name + PAST)
    try:
        with past.open() as file:
            return past, int(json.loads(file.readline())["summed_files"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return past, 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
