"""The busy and wait shares of a run's processes, computed from their spans."""

from __future__ import annotations

import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.metrics.estimates import EMPTY, Intervals, intersect, length, overlaps, subtract, union
from llamarl.metrics.span import FLUSH_NS, MAX_NS, Span, SpanFolder, executor_of

# Categories and names of spans.
DECODE, PUBLISH = ("busy", "decode"), ("publish", "publish")

Times = list[tuple[int, int]]
Tracks = dict[tuple[str, str], "array[int]"]
"""The spans of one process by category and name: start, end (Unix nanoseconds) and tokens of
each."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a window, each within 0 and 1: the busy share, and the shares of waits by their
    reasons."""

    busy: float
    waits: dict[str, float]


@dataclass(slots=True)
class RunTimeline:
    """The spans of a run by process; `steps`, from the first to the last `step` mark of each
    session (a resumed run has several); and `sessions`, from the first process's start to the last
    span. Before `whole_ns` some spans are sums, which are right in length but not in place."""

    processes: dict[str, Tracks]
    steps: Intervals
    sessions: Intervals
    whole_ns: int = 0

    def shares(self) -> dict[str, Shares]:
        """Return busy and wait shares of every process during `steps`."""
        return {name: shares_of(tracks, self.steps) for name, tracks in self.processes.items()}

    def both_busy_share(self) -> float:
        """Return the share of `steps`, from `whole_ns` on, in which both executors were busy at
        once."""
        busy: dict[str, Intervals] = {"generator": EMPTY, "trainer": EMPTY}
        for process, tracks in self.processes.items():
            if (executor := executor_of(process)) in busy:
                busy[executor] = union(np.concatenate([busy[executor], _busy(tracks)]))
        return _share(intersect(busy["generator"], busy["trainer"]), self._whole(self.steps))

    def tokens_during_publish(self) -> int:
        """Return the tokens decoded during publishes, from `whole_ns` on; a span partly inside
        counts partly."""
        all_tracks = self.processes.values()
        publishing = _union_of(each[PUBLISH] for each in all_tracks if PUBLISH in each)
        num_tokens = 0.0
        for decode in (_rows(each[DECODE]) for each in all_tracks if DECODE in each):
            inside_ns = overlaps(self._whole(publishing), decode[:, :2])
            num_tokens += float(inside_ns / np.maximum(decode @ (-1, 1, 0), 1) @ decode[:, 2])
        return round(num_tokens)

    def _whole(self, window: Intervals) -> Intervals:
        return intersect(window, np.array([[self.whole_ns, MAX_NS - 1]]))


def read_timeline(
    folder: str | Path, on_span: Callable[[str, Span], None] = lambda process, span: None
) -> RunTimeline:
    """Read the span files of all processes in `folder`; without files the timeline is empty.

    It also calls `on_span` with each process and span, so that the files need not be read twice."""
    processes = defaultdict[str, Tracks](dict)
    extents: dict[bool, dict[tuple[str, int], tuple[int, int]]] = {False: {}, True: {}}
    whole_ns = 0
    for process, span in SpanFolder(folder).read():
        on_span(process, span)
        _add(processes[process], span)
        if span.is_sum:
            whole_ns = max(whole_ns, span.end_ns)
        for is_step in {False, span.track == ("mark", "step")}:
            found, key = extents[is_step], (process, span.session)
            first_ns, last_ns = found.get(key, (span.start_ns, span.end_ns))
            found[key] = min(first_ns, span.start_ns), max(last_ns, span.end_ns)
    sessions, steps = (union(_pairs([*found.values()])) for found in extents.values())
    return RunTimeline(dict(processes), steps, sessions, whole_ns)


def tracks_of(spans: Iterable[Span]) -> Tracks:
    """Return these spans of one process, by category and name."""
    tracks: Tracks = {}
    for span in spans:
        _add(tracks, span)
    return tracks


def by_executor(shares: dict[str, Shares]) -> dict[str, Shares]:
    """Return the mean of the shares over the processes of each executor."""
    members: dict[str, list[Shares]] = defaultdict(list)
    for process, share in shares.items():
        members[executor_of(process)].append(share)
    result = {}
    for executor, each in sorted(members.items()):
        names = dict.fromkeys(name for share in each for name in share.waits)
        waits = {n: sum(share.waits.get(n, 0.0) for share in each) / len(each) for n in names}
        result[executor] = Shares(sum(share.busy for share in each) / len(each), waits)
    return result


def shares_of(tracks: Tracks, window: Intervals) -> Shares:
    """Return the shares of one process. Time that is busy and a wait counts as busy; time in two
    waits counts as the first of them by name."""
    taken, waits = _busy(tracks), {}
    busy = _share(taken, window)
    for (cat, name), track in sorted(tracks.items()):
        if cat == "wait":
            own = subtract(_union_of([track]), taken)
            waits[name] = _share(own, window)
            taken = union(np.concatenate([taken, own]))
    return Shares(busy, waits)


def _share(part: Intervals, whole: Intervals) -> float:
    """Return how much of `whole` is in `part`."""
    return length(intersect(part, whole)) / length(whole) if len(whole) else 0.0


def _add(tracks: Tracks, span: Span) -> None:
    num_tokens = span.args.get("tokens", 0) if span.name == "decode" else 0
    times = span.start_ns, span.end_ns
    tracks.setdefault(span.track, array("q")).extend((*times, num_tokens))


def _rows(track: array[int]) -> npt.NDArray[np.int64]:
    """Return [n, 3]: start, end and tokens of each span."""
    return np.array(track, dtype=np.int64).reshape(-1, 3)


def _union_of(tracks: Iterable[array[int]]) -> Intervals:
    return union(np.concatenate([EMPTY, *(_rows(track)[:, :2] for track in tracks)]))


def _busy(tracks: Tracks) -> Intervals:
    return _union_of(track for (cat, _), track in tracks.items() if cat == "busy")


def _pairs(times: Times) -> Intervals:
    return np.array(times, dtype=np.int64).reshape(-1, 2)


WINDOW_NS = 10 * 10**9
UNFLUSHED_NS = 2 * FLUSH_NS  # a process at work has written no span for less than this
MAX_FILES = 16  # read per executor: enough for a mean
DECODE_FILES = 4  # read of generators for their decode steps: replicas are alike


class RecentSpans:
    """Busy and wait shares of the last ten seconds, and seconds waited per step. It is thread-safe.

    The window ends now. A span is known once it has ended and its process has flushed it; processes
    work and wait in turn, so the time after the newest known span counts as a wait if that was
    work, and as work if it was a wait."""

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
        """Return busy and wait shares by executor over the last ten seconds."""
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
        """Return seconds by tag, in spans read since the last call: `wait/<executor>`, the mean
        over its processes (overlapping waits of one count each), and `publish/<kind>`, see
        `Exposure`."""
        waits: dict[str, list[float]] = defaultdict(list)
        with self._lock:
            self._read()
            for process, waited_ns in self._waited_ns.items():
                waits[f"wait/{executor_of(process)}"].append(waited_ns / 1e9)
                self._waited_ns[process] = 0
            found = {f"publish/{kind}": each_s for kind, each_s in self._exposure.take().items()}
        return found | {tag: sum(each) / len(each) for tag, each in waits.items()}

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
        """Return a span for the time since a process's newest span ended, unless that is not
        flushed yet."""
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
    """Sums up the seconds of publishes that no work hides, from spans as they are read.

    `trainer_s`: the trainer kept its weights for a write, or the controller the next batch for the
    publish before. `commit_s`: a replica did not decode because it committed. `starved_s`: a
    replica had nothing to decode while a version was on its way; it then has only rollouts that
    wait for this version. The last two are means over the replicas."""

    def __init__(self) -> None:
        self._processes: dict[str, set[str]] = defaultdict(set)  # by executor
        self._publishes: Times = []  # the run's first one, then those not taken yet
        self._idle: dict[str, Times] = defaultdict(list)  # of generators, by process
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)  # by kind and process

    def add(self, process: str, span: Span) -> None:
        """Add a span that has ended."""
        executor, times = executor_of(process), (span.start_ns, span.end_ns)
        seconds = (span.end_ns - span.start_ns) / 1e9
        self._processes[executor].add(process)
        if executor == "controller" and span.track == PUBLISH and "replica" not in span.args:
            self._publishes.append(times)  # else of one replica
        if executor == "generator" and span.track == ("wait", "requests"):
            self._idle[process].append(times)
        elif executor == "generator" and span.name == "commit":
            self._seconds["commit_s", process] += seconds
        if span.track in (("wait", "publish"), ("wait", "last_publish")):
            self._seconds["trainer_s", process] += seconds

    def take(self) -> dict[str, float]:
        """Return seconds per publish by kind, and `exposed_s`, their sum, since the last call;
        nothing before two publishes have ended, as waits during the newest one may be unread. A
        run's first publish does not count, for nothing goes on beside it."""
        done = self._publishes[1:-1]
        if not done:
            return {}
        during = union(_pairs(done))
        for process, idle in self._idle.items():
            waited = intersect(union(_pairs(idle)), during)
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
        """Return (rollouts in the step, seconds) of the steps that ended since the last call."""
        return [
            (span.args["tokens"], (span.end_ns - span.start_ns) / 1e9)
            for _, span in self._files.read()
            if span.track == DECODE and not span.is_sum and "tokens" in span.args
        ]
