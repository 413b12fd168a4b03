"""What the processes of a run did in the last seconds, read from their growing span files.

Owns: which files are read during the run, and how long their spans are kept. Does not own: the
format (`span_file.py`) or what a share is (`aggregate.py`). Invariant: each span is read once, also
when several threads ask.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from llamarl.metrics.aggregate import Shares, by_executor, executor_of, shares_of, tracks_of
from llamarl.metrics.exposure import Exposure
from llamarl.metrics.intervals import union
from llamarl.metrics.span import FLUSH_NS
from llamarl.metrics.span_file import Span, SpanReader, span_files

WINDOW_NS = 10 * 10**9
UNFLUSHED_NS = 2 * FLUSH_NS  # a process at work has written no span for less than this
MAX_FILES = 16  # read per executor: enough for a mean


class RecentSpans:
    """Busy and wait shares of the last ten seconds, and seconds waited per step. Thread-safe.

    The window ends now. A span is known once it has ended and its process has flushed it; processes
    work and wait in turn, so what follows the newest known span counts as a wait if that was work,
    and as work if it was a wait. Of an executor with more than `MAX_FILES` processes, that many,
    evenly spread, are read.
    """

    def __init__(
        self,
        folder: str | Path,
        since_ns: int | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Spans that ended before `since_ns` (Unix; default: now) belong to older sessions."""
        self._folder, self._clock_ns = Path(folder), clock_ns
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._readers: dict[str, SpanReader] = {}
        self._seen: set[str] = set()
        self._spans: dict[str, list[Span]] = defaultdict(list)  # by process
        self._waited_ns: dict[str, int] = {}
        self._exposure = Exposure()
        self._lock = threading.Lock()

    def shares(self) -> dict[str, Shares]:
        """Busy and wait shares by executor over the last ten seconds."""
        with self._lock:
            self._read()
            known = [(process, spans) for process, spans in self._spans.items() if spans]
            whole = ((process, spans + self._since_newest(spans)) for process, spans in known)
            shares = {
                process: shares_of(tracks_of(spans), union(np.array([self._window(spans)])))
                for process, spans in whole
            }
        return by_executor(shares)

    def take_waits_s(self) -> dict[str, float]:
        """Executor -> seconds waited (mean over its processes) in waits read since the last call.

        Overlapping waits of one process count each.
        """
        with self._lock:
            self._read()
            members: dict[str, list[float]] = defaultdict(list)
            for process, waited_ns in self._waited_ns.items():
                members[executor_of(process)].append(waited_ns / 1e9)
                self._waited_ns[process] = 0
        return {executor: sum(waits) / len(waits) for executor, waits in members.items()}

    def take_exposure(self) -> dict[str, float]:
        """Seconds per publish that generators and trainer stood still for it, by kind, in spans
        read since the last call (see `Exposure.take`)."""
        with self._lock:
            self._read()
            return self._exposure.take()

    def _read(self) -> None:
        for process, span in self._new_spans():
            self._exposure.add(process, span)
            if span.cat == "publish":
                continue
            self._spans[process].append(span)
            waited_ns = span.end_ns - span.start_ns if span.cat == "wait" else 0
            self._waited_ns[process] = self._waited_ns.get(process, 0) + waited_ns
        for spans in self._spans.values():
            start_ns = self._window(spans)[0]
            spans[:] = [span for span in spans if span.end_ns > start_ns]

    def _new_spans(self) -> Iterator[tuple[str, Span]]:
        """(process, span) of each busy, wait or publish span that was not read yet."""
        self._open_new_files()
        for process, reader in self._readers.items():
            for span in reader.read():
                if span.end_ns >= self._since_ns and span.cat in ("busy", "wait", "publish"):
                    yield process, span

    def _open_new_files(self) -> None:
        new: dict[str, list[Path]] = defaultdict(list)
        for path in span_files(self._folder):
            if path.stem not in self._seen:
                new[executor_of(path.stem)].append(path)
                self._seen.add(path.stem)
        for executor, paths in new.items():
            room = MAX_FILES - [*map(executor_of, self._readers)].count(executor)
            chosen = paths[:: math.ceil(len(paths) / room)] if room else []
            self._readers |= {path.stem: SpanReader(path) for path in chosen}

    def _since_newest(self, spans: list[Span]) -> list[Span]:
        """What a process has done since its newest span ended, unless that is not flushed yet."""
        newest = max(spans, key=lambda span: span.end_ns)
        now_ns = self._clock_ns()
        if now_ns - newest.end_ns < UNFLUSHED_NS:
            return []
        cat, name = "busy", newest.name
        if newest.cat == "busy":
            names = [span.name for span in spans if span.cat == "wait"]
            cat, name = "wait", names[-1] if names else "work"
        return [Span(newest.session, name, cat, newest.end_ns, now_ns, {})]

    def _window(self, spans: list[Span]) -> tuple[int, int]:
        newest_ns = max((span.end_ns for span in spans), default=0)
        return max(newest_ns - WINDOW_NS, self._since_ns), newest_ns
