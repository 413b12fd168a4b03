"""The spans of all processes as one timeline that https://ui.perfetto.dev opens.

Owns: the conversion to Chrome's trace event format. Does not own: the spans, or reading them
(`aggregate.py`). Invariant: spans on one track never overlap (Perfetto drops those that do), and no
file is ever whole in memory.
"""

from __future__ import annotations

import functools
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from llamarl.metrics.aggregate import executor_of
from llamarl.metrics.span_file import Span, SpanReader, span_files

TRACKS = ("work", "publish", "mark")  # busy and wait spans share a track: they alternate
MAX_LANES = 1000
PROCESS_ORDER = ("controller", "generator", "trainer", "scorer", "reference", "storage")


class TraceFile:
    """Writes one trace; use it as a context manager, and give it the spans process by process.

    Times are microseconds since the first span of all, on a clock common to all processes (each
    process's origin line leads from its host's monotonic clock to Unix time). Replaces `out_path`
    in one move, once the block has ended well.
    """

    def __init__(self, spans_folder: str | Path, out_path: str | Path) -> None:
        self.num_spans = 0
        paths = sorted(span_files(spans_folder), key=_place)
        self._pids = {path.stem: pid for pid, path in enumerate(paths, start=1)}
        # The first that a process records is its start.
        firsts = (next(SpanReader(path).read(), None) for path in paths)
        self._zero_ns = min((span.start_ns for span in firsts if span is not None), default=0)
        self._out_path = out_path
        self._unfinished = Path(f"{out_path}.tmp")
        self._lanes: dict[str, _Lanes] = {}
        self._cut_ns: dict[str, int] = {}  # by process: before this, its spans are sums

    def __enter__(self) -> TraceFile:
        self._file = self._unfinished.open("w")
        self._separator = ""
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cut = {name: f"from {_utc(ns)} on" for name, ns in self._cut_ns.items()}
        self._file.write(
            "\n]" + (f', "otherData": {json.dumps({"cut": cut})}' if cut else "") + "}\n"
        )
        self._file.close()
        if kind is None:
            os.replace(self._unfinished, self._out_path)

    def add(self, process: str, span: Span) -> None:
        """Write `span`; a sum of spans only adds a note that the trace of `process` is cut."""
        pid = self._pids[process]
        if process not in self._lanes:
            self._lanes[process] = _Lanes()
            self._write(_name("process_name", pid, 0, process))
            self._write(_event("process_sort_index", pid, 0, sort_index=pid))
        if span.is_sum:
            self._cut_ns[process] = max(self._cut_ns.get(process, 0), span.end_ns)
            return
        tid, is_new = self._lanes[process].place(span)
        if is_new:
            track, lane = TRACKS[tid // MAX_LANES], tid % MAX_LANES
            self._write(_name("thread_name", pid, tid, f"{track} {lane}" if lane > 1 else track))
        self.num_spans += 1
        times_us = (span.start_ns - self._zero_ns) / 1e3, (span.end_ns - span.start_ns) / 1e3
        self._write(
            f'{{"ph": "X", "name": {_quoted(span.name)}, "cat": {_quoted(span.cat)}, "pid": {pid}, '
            f'"tid": {tid}, "ts": {times_us[0]}, "dur": {times_us[1]}, '
            f'"args": {json.dumps(span.args)}}}'
        )

    def _write(self, event: str) -> None:
        self._file.write(self._separator + event)
        self._separator = ",\n"


class _Lanes:
    """Gives overlapping spans of one process different thread ids."""

    def __init__(self) -> None:
        self._ends_ns: dict[str, list[int]] = {track: [] for track in TRACKS}

    def place(self, span: Span) -> tuple[int, bool]:
        """Thread id of the first lane that is free from the span's start, and whether it is new."""
        track = {"busy": "work", "wait": "work", "publish": "publish"}.get(span.cat, "mark")
        ends_ns = self._ends_ns[track]
        lane = next((i for i, end in enumerate(ends_ns) if end <= span.start_ns), len(ends_ns))
        is_new = lane == len(ends_ns)
        if is_new:
            ends_ns.append(0)
        ends_ns[lane] = span.end_ns
        return TRACKS.index(track) * MAX_LANES + lane + 1, is_new


def _name(kind: str, pid: int, tid: int, name: str) -> str:
    return _event(kind, pid, tid, name=name)


def _event(kind: str, pid: int, tid: int, **args: Any) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


_quoted = functools.cache(json.dumps)


def _utc(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="seconds")


def _place(path: Path) -> tuple[int, str]:
    executor = executor_of(path.stem)
    known = executor in PROCESS_ORDER
    return (PROCESS_ORDER.index(executor) if known else len(PROCESS_ORDER), path.stem)
