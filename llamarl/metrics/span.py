"""Spans: what each process did, from when to when.

Owns: the recorder every executor carries, the file format and its reader. Does not own: what is
computed from spans (`aggregate.py`). Invariant: every line is one finished span; times are
nanoseconds of the host's monotonic clock, which all processes of one host share.

Categories: `busy` (useful work), `wait` (the name says for what), `publish`, `mark` (anything
else). Example line: {"name": "decode", "cat": "busy", "start_ns": 5, "end_ns": 9, "tokens": 64}.
Each time a process starts it appends an origin line, which leads from its clock to Unix time, and
a `start` mark; so a resumed run's file holds several sessions.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FLUSH_SPANS = 256  # a killed process loses at most this many,
FLUSH_NS = 10**9  # and none that is followed by another one this much later


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


class Spans:
    """Records spans of one process into `folder/<process>.jsonl`; `folder` None keeps nothing.

    Thread-safe. `process` is unique in a run, such as `generator-0` or `trainer-1`.
    """

    def __init__(self, process: str, folder: str | Path | None) -> None:
        self.process = process
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._path = Path(folder) / f"{process}.jsonl" if folder is not None else None
        self._flushed_ns = now_ns = time.monotonic_ns()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._lines.append("")  # ends the line that a killed session left unfinished
            origin = {"process": process, "unix_minus_monotonic_ns": time.time_ns() - now_ns}
            self._lines.append(json.dumps(origin))
            self.record("start", now_ns, now_ns, "mark")

    @contextmanager
    def span(self, name: str, cat: str = "busy", **args: Any) -> Iterator[None]:
        """Record the block as one span, also when it raises."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(name, start_ns, time.monotonic_ns(), cat, **args)

    def record(self, name: str, start_ns: int, end_ns: int, cat: str = "busy", **args: Any) -> None:
        """Add a span measured by the caller."""
        if self._path is None:
            return
        line = {"name": name, "cat": cat, "start_ns": start_ns, "end_ns": end_ns, **args}
        with self._lock:
            self._lines.append(json.dumps(line))
            if len(self._lines) >= FLUSH_SPANS or end_ns - self._flushed_ns >= FLUSH_NS:
                self._flush()

    def close(self) -> None:
        """Write what is still in memory."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._flushed_ns = time.monotonic_ns()
        if self._path is not None and self._lines:
            with self._path.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()


class SpanReader:
    """Reads one process's file, also while it grows: every `read` continues where the last ended.

    A line that a killed process left unfinished is skipped.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.process = self.path.stem
        self._num_bytes_read = 0
        self._session = -1
        self._unix_minus_monotonic_ns = 0

    def read(self) -> Iterator[Span]:
        """Spans not read yet, in the order they were recorded (by their end, nearly)."""
        with self.path.open("rb") as file:
            file.seek(self._num_bytes_read)
            for text in file:
                if not text.endswith(b"\n"):
                    return  # still being written
                self._num_bytes_read += len(text)
                span = self._parse(text)
                if span is not None:
                    yield span

    def _parse(self, text: bytes) -> Span | None:
        try:
            line = json.loads(text)
        except ValueError:
            return None
        if "unix_minus_monotonic_ns" in line:
            self._unix_minus_monotonic_ns = line["unix_minus_monotonic_ns"]
            self._session += 1
            return None
        offset_ns = self._unix_minus_monotonic_ns
        start_ns, end_ns = line.pop("start_ns") + offset_ns, line.pop("end_ns") + offset_ns
        return Span(self._session, line.pop("name"), line.pop("cat"), start_ns, end_ns, line)


def span_files(folder: str | Path) -> list[Path]:
    """The span files of all processes, in a stable order."""
    return sorted(Path(folder).glob("*.jsonl"))
