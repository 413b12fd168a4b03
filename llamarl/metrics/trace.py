"""The spans of all processes as one timeline that https://ui.perfetto.dev opens.

Owns: the conversion to Chrome's trace event format. Does not own: the spans, or reading them
(`aggregate.py`). Invariant: spans on one track never overlap (Perfetto drops those that do), and no
file is ever whole in memory.
"""

import functools
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from llamarl.metrics.aggregate import executor_of
from llamarl.metrics.span_file import Span, SpanReader, span_files

TRACKS = ("work", "publish", "mark")  # busy and wait spans share a track: they alternate
TRACK_OF = {"busy": 0, "wait": 0, "publish": 1}  # by category; any other is a mark
MAX_LANES = 1000
PROCESS_ORDER = ("controller", "generator", "trainer", "scorer", "reference", "storage")


class TraceFile:
    """Writes one trace; use it as a context manager, and `add` the spans process by process.

    Times are microseconds since the first span of the run. Replaces `out_path` in one move, once
    the block has ended without an error.
    """

    def __init__(self, spans_folder: str | Path, out_path: str | Path) -> None:
        self.num_spans = 0
        paths = sorted(span_files(spans_folder), key=_order)
        self._pids = {path.stem: pid for pid, path in enumerate(paths, start=1)}
        # The first span of a process is its start.
        firsts = (next(SpanReader(path).read(), None) for path in paths)
        self._zero_ns = min((span.start_ns for span in firsts if span is not None), default=0)
        self._out_path = out_path
        self._unfinished = Path(f"{out_path}.tmp")
        self._lane_ends_ns: dict[str, list[list[int]]] = {}  # by process and track, of each lane
        self._cut_ns: dict[str, int] = {}  # by process: before this, its spans are sums

    def __enter__(self) -> Self:
        self._file = self._unfinished.open("w")
        self._separator = ""
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        cut = {name: f"from {_utc(ns)} on" for name, ns in self._cut_ns.items()}
        other_data = f', "otherData": {json.dumps({"cut": cut})}' if cut else ""
        self._file.write(f"\n]{other_data}}}\n")
        self._file.close()
        if kind is None:
            os.replace(self._unfinished, self._out_path)

    def add(self, process: str, span: Span) -> None:
        """Write `span`; a sum of spans only adds a note that the trace of `process` is cut."""
        pid = self._pids[process]
        if process not in self._lane_ends_ns:
            self._lane_ends_ns[process] = [[] for _ in TRACKS]
            self._write_metadata("process_name", pid, 0, name=process)
            self._write_metadata("process_sort_index", pid, 0, sort_index=pid)
        if span.is_sum:
            self._cut_ns[process] = max(self._cut_ns.get(process, 0), span.end_ns)
            return
        tid = self._place(process, span)
        self.num_spans += 1
        times_us = (span.start_ns - self._zero_ns) / 1e3, (span.end_ns - span.start_ns) / 1e3
        self._write(
            f'{{"ph": "X", "name": {_quoted(span.name)}, "cat": {_quoted(span.cat)}, "pid": {pid}, '
            f'"tid": {tid}, "ts": {times_us[0]}, "dur": {times_us[1]}, '
            f'"args": {json.dumps(span.args)}}}'
        )

    def _place(self, process: str, span: Span) -> int:
        """Thread id of the first lane of the span's track that is free at its start."""
        track = TRACK_OF.get(span.cat, len(TRACKS) - 1)
        ends_ns = self._lane_ends_ns[process][track]
        lane = next((i for i, end in enumerate(ends_ns) if end <= span.start_ns), len(ends_ns))
        tid = track * MAX_LANES + lane + 1
        if lane == len(ends_ns):
            ends_ns.append(0)
            name = f"{TRACKS[track]} {lane + 1}" if lane else TRACKS[track]
            self._write_metadata("thread_name", self._pids[process], tid, name=name)
        ends_ns[lane] = span.end_ns
        return tid

    def _write_metadata(self, kind: str, pid: int, tid: int, **args: Any) -> None:
        event = {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
        self._write(json.dumps(event))

    def _write(self, event: str) -> None:
        self._file.write(self._separator + event)
        self._separator = ",\n"


_quoted = functools.cache(json.dumps)


def _utc(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="seconds")


def _order(path: Path) -> tuple[int, str]:
    executor = executor_of(path.stem)
    known = executor in PROCESS_ORDER
    return (PROCESS_ORDER.index(executor) if known else len(PROCESS_ORDER), path.stem)
