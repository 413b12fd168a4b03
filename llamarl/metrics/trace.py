"""The spans of all processes as one timeline that https://ui.perfetto.dev opens.

Owns: the conversion to Chrome's trace event format. Does not own: the spans. Invariant: spans on
one track never overlap (Perfetto drops those that do), and no file is ever whole in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarl.metrics.aggregate import executor_of
from llamarl.metrics.span import Span, SpanReader, span_files

TRACKS = ("work", "publish", "mark")  # busy and wait spans share a track: they alternate
MAX_LANES = 1000
PROCESS_ORDER = ("controller", "generator", "trainer", "scorer", "reference", "storage")


def merge(spans_folder: str | Path, out_path: str | Path) -> int:
    """Write the trace of every `<process>.jsonl` in the folder; returns the number of spans.

    Times are microseconds since the first span of all, on a clock common to all processes (each
    process's origin line leads from its host's monotonic clock to Unix time). Replaces `out_path`
    in one move.
    """
    paths = sorted(span_files(spans_folder), key=_place)
    starts_ns = (span.start_ns for path in paths for span in SpanReader(path).read())
    zero_ns = min(starts_ns, default=0)
    unfinished = Path(f"{out_path}.tmp")
    num_spans = 0
    with unfinished.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for pid, path in enumerate(paths, start=1):
            for event in _events(pid, path, zero_ns):
                file.write(separator + json.dumps(event))
                separator = ",\n"
                num_spans += event["ph"] == "X"
        file.write("\n]}\n")
    os.replace(unfinished, out_path)
    return num_spans


def _events(pid: int, path: Path, zero_ns: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", pid, 0, path.stem)
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": pid,
        "tid": 0,
        "args": {"sort_index": pid},
    }
    lanes = _Lanes()
    for span in SpanReader(path).read():
        tid, is_new = lanes.place(span)
        if is_new:
            track, lane = TRACKS[tid // MAX_LANES], tid % MAX_LANES
            yield _name("thread_name", pid, tid, f"{track} {lane}" if lane > 1 else track)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.cat,
            "pid": pid,
            "tid": tid,
            "ts": (span.start_ns - zero_ns) / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
            "args": span.args,
        }


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


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _place(path: Path) -> tuple[int, str]:
    executor = executor_of(path.stem)
    known = executor in PROCESS_ORDER
    return (PROCESS_ORDER.index(executor) if known else len(PROCESS_ORDER), path.stem)
