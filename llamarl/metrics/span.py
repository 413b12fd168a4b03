"""Spans: what each process did, from when to when.

Owns: the recorder that every executor has. Does not own: the file format (`span_file.py`), how old
spans are summed (`span_history.py`), what is computed from spans (`aggregate.py`). Invariant: the
file of a process stays below its limit; times are nanoseconds of the host's monotonic clock, which
all processes of one host share.

Categories: `busy` (useful work), `wait` (the name says for what), `publish`, `mark` (anything
else). Example line: {"name": "decode", "cat": "busy", "start_ns": 5, "end_ns": 9, "tokens": 64}.
Each time a process starts it appends an origin line, which converts its clock to Unix time, and a
`start` mark; so a resumed run's file holds several sessions.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamarl.metrics.span_history import FULL_SHARE, sum_old_spans

FLUSH_SPANS = 256  # a killed process loses at most this many spans
FLUSH_NS = 10**9  # what is older is written when the next span is recorded


class Spans:
    """Records spans of one process into `folder/<process>.jsonl`; `folder` None keeps nothing.

    Thread-safe. `process` is unique in a run, such as `generator-0` or `trainer-1`. Its file takes
    at most `limit_bytes` (None: no limit); older spans are then summed.
    """

    def __init__(
        self, process: str, folder: str | Path | None, limit_bytes: int | None = None
    ) -> None:
        self.process = process
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._summing: threading.Thread | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._path = Path(folder) / f"{process}.jsonl" if folder is not None else None
        self._flushed_ns = now_ns = time.monotonic_ns()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._lines.append("")  # ends the line that a killed session left unfinished
                self._num_bytes = self._path.stat().st_size
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
                self._flush(self._path)

    def close(self) -> None:
        """Write what is still in memory; it goes with the run's folder if that is removed."""
        with self._lock:
            if self._path is not None:
                with suppress(FileNotFoundError):
                    self._flush(self._path)
            if self._summing is not None:
                self._summing.join()

    def _flush(self, path: Path) -> None:
        if self._summing is not None:
            self._summing.join()  # no wait, unless tens of thousands of spans come in a second
        self._flushed_ns = time.monotonic_ns()
        text = "".join(line + "\n" for line in self._lines)
        self._lines.clear()
        with path.open("a") as file:
            file.write(text)
        self._num_bytes += len(text)
        if self._limit_bytes is not None and self._num_bytes >= FULL_SHARE * self._limit_bytes:
            # Beside the process's work: reading the spans back takes tenths of a second.
            self._summing = threading.Thread(target=self._sum_old_spans, daemon=True)
            self._summing.start()

    def _sum_old_spans(self) -> None:
        assert self._path is not None
        assert self._limit_bytes is not None
        self._num_bytes = sum_old_spans(self._path, self._limit_bytes)
