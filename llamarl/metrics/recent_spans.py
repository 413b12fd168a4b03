"""What the processes of a run do now, from their growing span files.

Owns: shares of the last seconds, waits since the last step, what publishes cost, decode steps. Does
not own: reading the files (`span.py`) or what a share is (`shares.py`). Invariant: each span counts
once, also when several threads ask; a wait for a publish counts with the one during which it was.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llamarl.metrics.intervals import intersect, length, union
from llamarl.metrics.shares import DECODE, PUBLISH, Shares, by_executor, shares_of, tracks_of
from llamarl.metrics.span import FLUSH_NS, Span, SpanFolder, executor_of

WINDOW_NS = 10 * 10**9
UNFLUSHED_NS = 2 * FLUSH_NS  # a process at work has written no span for less than this
MAX_FILES = 16  # read per executor: enough for a mean
DECODE_FILES = 4  # read of generators for their decode steps: replicas are alike

Times = list[tuple[int, int]]


class RecentSpans:
    """Busy and wait shares of the last ten seconds, and seconds waited per step. Thread-safe.

    The window ends now. A span is known once it has ended and its process has flushed it; processes
    work and wait in turn, so what follows the newest known span counts as a wait if that was work,
    and as work if it was a wait.
    """

    def __init__(
        self,
        folder: str | Path,
        since_ns: int | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Spans that ended before `since_ns` (Unix; default: now) belong to older sessions."""
        self._clock_ns = clock_ns
        self._files = SpanFolder(folder, max_files=MAX_FILES)
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._spans: dict[str, list[Span]] = defaultdict(list)  # by process
        self._waited_ns: dict[str, int] = defaultdict(int)  # by process
        self._exposure = Exposure()
        self._lock = threading.Lock()

    def shares(self) -> dict[str, Shares]:
        """Busy and wait shares by executor over the last ten seconds."""
        with self._lock:
            self._read()
            shares = {}
            for process, spans in self._spans.items():
                if spans:
                    whole = spans + self._since_newest(spans)
                    window = union(np.array([self._window(whole)]))
                    shares[process] = shares_of(tracks_of(whole), window)
        return by_executor(shares)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by tag, in spans read since the last call: `wait/<executor>`, the mean over its
        processes (overlapping waits of one count each), and `publish/<kind>`, see `Exposure`."""
        waits: dict[str, list[float]] = defaultdict(list)
        with self._lock:
            self._read()
            for process, waited_ns in self._waited_ns.items():
                waits[f"wait/{executor_of(process)}"].append(waited_ns / 1e9)
                self._waited_ns[process] = 0
            exposure = {f"publish/{kind}": each_s for kind, each_s in self._exposure.take().items()}
        return exposure | {tag: sum(each) / len(each) for tag, each in waits.items()}

    def _read(self) -> None:
        for process, span in self._files.read():
            if span.end_ns < self._since_ns or span.cat not in ("busy", "wait", "publish"):
                continue
            self._exposure.add(process, span)
            if span.cat != "publish":
                self._spans[process].append(span)
                is_wait = span.cat == "wait"
                self._waited_ns[process] += span.end_ns - span.start_ns if is_wait else 0
        for spans in self._spans.values():
            start_ns = self._window(spans)[0]
            spans[:] = [span for span in spans if span.end_ns > start_ns]

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


class Exposure:
    """Sums up spans as they are read.

    `trainer_s`: the trainer kept its weights for a write, or the controller the next batch for the
    publish before. `commit_s`: a replica did not decode because it committed, or between the
    buckets of a version. `starved_s`: a replica had nothing to decode while a version was on its
    way; rollouts that wait for it are all it has then. The last two are means over the replicas.
    """

    def __init__(self) -> None:
        self._processes: dict[str, set[str]] = defaultdict(set)  # by executor
        self._publishes: Times = []  # the run's first one, then those not taken yet
        self._idle: dict[str, Times] = defaultdict(list)  # of generators, by process
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)  # by kind and process

    def add(self, process: str, span: Span) -> None:
        """A span that has ended."""
        executor, times = executor_of(process), (span.start_ns, span.end_ns)
        self._processes[executor].add(process)
        if executor == "controller" and span.track == PUBLISH and "replica" not in span.args:
            self._publishes.append(times)  # else of one replica
        if executor == "generator" and span.track == ("wait", "requests"):
            self._idle[process].append(times)
        is_commit = span.name == "commit" or span.track == ("wait", "buckets")
        if executor == "generator" and is_commit:
            self._seconds["commit_s", process] += (times[1] - times[0]) / 1e9
        if span.cat == "wait" and span.name in ("publish", "last_publish"):
            self._seconds["trainer_s", process] += (times[1] - times[0]) / 1e9

    def take(self) -> dict[str, float]:
        """Seconds per publish by kind, and `exposed_s`, their sum, since the last call; nothing
        before two publishes have ended: what was waited for during the newest may be unread. A
        run's first publish does not count, for nothing goes on beside it."""
        done = self._publishes[1:-1]
        if not done:
            return {}
        during = union(np.array(done, dtype=np.int64))
        for process, idle in self._idle.items():
            waited = intersect(union(np.array(idle, dtype=np.int64).reshape(-1, 2)), during)
            self._seconds["starved_s", process] += length(waited) / 1e9
            self._idle[process] = [times for times in idle if times[1] > self._publishes[-1][0]]
        found = dict.fromkeys(("trainer_s", "commit_s", "starved_s"), 0.0)
        for (kind, process), each_s in self._seconds.items():
            found[kind] += each_s / len(self._processes[executor_of(process)]) / len(done)
        del self._publishes[1:-1]
        self._seconds.clear()
        return found | {"exposed_s": sum(found.values())}


class DecodeSteps:
    """The new decode steps of some generators, from the span files in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._files = SpanFolder(folder, executor="generator", max_files=DECODE_FILES)

    def read(self) -> list[tuple[int, float]]:
        """(rollouts in the step, seconds) of those that ended since the last call."""
        return [
            (span.args["tokens"], (span.end_ns - span.start_ns) / 1e9)
            for _, span in self._files.read()
            if span.track == DECODE and not span.is_sum and "tokens" in span.args
        ]
