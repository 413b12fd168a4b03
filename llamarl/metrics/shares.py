"""What the processes of a run did with their time, computed from their spans.

Owns: busy and wait shares, overlap of generator and trainer, tokens decoded during publishes. Does
not own: reading the files (`span.py`), shares during the run (`recent_spans.py`). Invariant: busy
and wait shares of a process are disjoint, so they sum to at most 1. An executor's are the mean over
its processes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.metrics.intervals import EMPTY, Intervals, intersect, length, overlaps, subtract, union
from llamarl.metrics.span import MAX_NS, Span, SpanFolder, executor_of

DECODE, PUBLISH = ("busy", "decode"), ("publish", "publish")  # categories and names of spans

Tracks = dict[tuple[str, str], "array[int]"]
"""Spans of one process by category and name: start, end (Unix nanoseconds) and tokens of each."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a window, each within 0 and 1: busy, and waiting by what was waited for."""

    busy: float
    waits: dict[str, float]


@dataclass(slots=True)
class RunTimeline:
    """All spans of a run by process, and when its sessions ran.

    `steps`: from the first to the last `step` mark, one interval per session (a resumed run has
    several). `sessions`: from the first process's start to the last span. Before `whole_ns` some
    spans are sums, which are right in length but not in place.
    """

    processes: dict[str, Tracks]
    steps: Intervals
    sessions: Intervals
    whole_ns: int = 0

    def shares(self) -> dict[str, Shares]:
        """Busy and wait shares of every process during `steps`."""
        return {name: shares_of(tracks, self.steps) for name, tracks in self.processes.items()}

    def both_busy_share(self) -> float:
        """Share of `steps`, from `whole_ns` on, in which generator and trainer were busy at
        once."""
        window = self._whole(self.steps)
        both = intersect(self._busy("generator"), self._busy("trainer"))
        return _share(intersect(both, window), window)

    def tokens_during_publish(self) -> int:
        """Tokens decoded during publishes, from `whole_ns` on; a span partly inside counts
        partly."""
        all_tracks = self.processes.values()
        publishing = _union_of(each[PUBLISH] for each in all_tracks if PUBLISH in each)
        num_tokens = 0.0
        for decode in (each[DECODE] for each in all_tracks if DECODE in each):
            inside_ns = overlaps(self._whole(publishing), _times(decode))
            inside = inside_ns / np.maximum(_times(decode) @ (-1, 1), 1)
            num_tokens += float(inside @ _rows(decode)[:, 2])
        return round(num_tokens)

    def _whole(self, window: Intervals) -> Intervals:
        return intersect(window, np.array([[self.whole_ns, MAX_NS - 1]]))

    def _busy(self, executor: str) -> Intervals:
        processes = (name for name in self.processes if executor_of(name) == executor)
        return union(np.concatenate([EMPTY, *(_busy(self.processes[name]) for name in processes)]))


def read_timeline(
    folder: str | Path, on_span: Callable[[str, Span], None] = lambda process, span: None
) -> RunTimeline:
    """Read the span files of all processes in `folder`; without files the timeline is empty.

    Also calls `on_span` with each process and span, so that the files need not be read twice.
    """
    processes = defaultdict[str, Tracks](dict)
    steps: dict[tuple[str, int], list[int]] = {}
    sessions: dict[tuple[str, int], list[int]] = {}
    whole_ns = 0
    for process, span in SpanFolder(folder).read():
        on_span(process, span)
        _add(processes[process], span)
        if span.is_sum:
            whole_ns = max(whole_ns, span.end_ns)
        _stretch(sessions, (process, span.session), span)
        if span.track == ("mark", "step"):
            _stretch(steps, (process, span.session), span)
    return RunTimeline(dict(processes), _as_intervals(steps), _as_intervals(sessions), whole_ns)


def tracks_of(spans: Iterable[Span]) -> Tracks:
    """These spans of one process, by category and name."""
    tracks: Tracks = {}
    for span in spans:
        _add(tracks, span)
    return tracks


def by_executor(shares: dict[str, Shares]) -> dict[str, Shares]:
    """Mean of the shares over the processes of each executor."""
    members: dict[str, list[Shares]] = defaultdict(list)
    for process, share in shares.items():
        members[executor_of(process)].append(share)
    result = {}
    for executor, each in sorted(members.items()):
        waits: dict[str, float] = defaultdict(float)
        for share in each:
            for name, wait in share.waits.items():
                waits[name] += wait / len(each)
        result[executor] = Shares(sum(share.busy for share in each) / len(each), dict(waits))
    return result


def shares_of(tracks: Tracks, window: Intervals) -> Shares:
    """The shares of one process. Time that is busy and a wait counts as busy; time in two waits
    counts as the first of them by name."""
    taken = _busy(tracks)
    busy = _share(intersect(taken, window), window)
    waits = {}
    for (cat, name), track in sorted(tracks.items()):
        if cat == "wait":
            own = subtract(union(_times(track)), taken)
            waits[name] = _share(intersect(own, window), window)
            taken = union(np.concatenate([taken, own]))
    return Shares(busy, waits)


def _share(part: Intervals, whole: Intervals) -> float:
    return length(part) / length(whole) if len(whole) else 0.0


def _add(tracks: Tracks, span: Span) -> None:
    num_tokens = span.args.get("tokens", 0) if span.name == "decode" else 0
    times = span.start_ns, span.end_ns
    tracks.setdefault(span.track, array("q")).extend((*times, num_tokens))


def _rows(track: array[int]) -> npt.NDArray[np.int64]:
    """[n, 3]: start, end and tokens of each span."""
    return np.array(track, dtype=np.int64).reshape(-1, 3)


def _times(track: array[int]) -> Intervals:
    return _rows(track)[:, :2]


def _union_of(tracks: Iterable[array[int]]) -> Intervals:
    return union(np.concatenate([EMPTY, *map(_times, tracks)]))


def _busy(tracks: Tracks) -> Intervals:
    return _union_of(track for (cat, _), track in tracks.items() if cat == "busy")


def _stretch(extents: dict[tuple[str, int], list[int]], key: tuple[str, int], span: Span) -> None:
    """Make the interval under `key` reach over `span`."""
    extent = extents.setdefault(key, [span.start_ns, span.end_ns])
    extent[0], extent[1] = min(extent[0], span.start_ns), max(extent[1], span.end_ns)


def _as_intervals(extents: dict[tuple[str, int], list[int]]) -> Intervals:
    return union(np.array(list(extents.values()), dtype=np.int64).reshape(-1, 2))
