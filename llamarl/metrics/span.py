"""Spans: what each process did, from when to when.

Owns: the recorder every executor carries and the file format. Does not own: what is computed from
spans (`aggregate.py`). Invariant: every line is one finished span; times are nanoseconds of the
host's monotonic clock, which all processes of one host share.

Categories: `busy` (useful work), `wait` (the name says for what), `publish`, `mark` (anything
else). Example line: {"name": "decode", "cat": "busy", "start_ns": 5, "end_ns": 9, "tokens": 64}.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLUSH_SPANS = 256  # a killed process loses at most this many


class Spans:
    """Records spans of one process into `folder/<process>.jsonl`; `folder` None keeps nothing.

    Thread-safe. `process` is unique in a run, such as `generator-0` or `trainer-1`.
    """

    def __init__(self, process: str, folder: str | Path | None) -> None:
        self.process = process
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._path = Path(folder) / f"{process}.jsonl" if folder is not None else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            origin = {
                "process": process,
                "unix_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
            }
            self._lines.append(json.dumps(origin))

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
            if len(self._lines) >= FLUSH_SPANS:
                self._flush()

    def close(self) -> None:
        """Write what is still in memory."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._path is not None and self._lines:
            with self._path.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()
