"""What the processes of a run did with their time, computed from their span files.

Owns: busy and wait shares, overlap of generator and trainer, tokens written during publishes. Does
not own: the files (`span_file.py`), the same while a run goes on (`live.py`) or what is shown.
Invariant: for each process busy and wait shares are disjoint, so they sum to at most 1.

An executor's processes are named `<executor>-<number>`, with a rank behind it if need be; its
shares are the mean over them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.metrics.intervals import EMPTY, Intervals, intersect, length, overlaps, subtract, union
from llamarl.metrics.span_file import Span, SpanReader, span_files

LAST_NS = 2**63 - 1


@dataclass(slots=True)
class Track:
    """The spans of one process under one category and name; times are Unix nanoseconds."""

    times_ns: array[int] = field(default_factory=lambda: array("q"))  # start, end, start, end, ...
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def intervals(self) -> Intervals:
        """Every span, [n, 2], in the order recorded."""
        return np.array(self.times_ns, dtype=np.int64).reshape(-1, 2)


Tracks = dict[tuple[str, str], Track]  # (category, name) -> spans


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a window, each within 0 and 1: useful work, and waiting by what was waited for."""

    busy: float
    waits: dict[str, float]


@dataclass(slots=True)
class RunTimeline:
    """All spans of a run by process, and the extents of its sessions.

    `steps` is the set of time from the first to the last `step` mark, one interval per session (a
    resumed run has several). `sessions` reaches from the first process's start to the last span.
    Before `whole_ns` there are sums of spans, which show how much but not exactly when.
    """

    processes: dict[str, Tracks]
    steps: Intervals
    sessions: Intervals
    whole_ns: int = 0

    def shares(self, window: Intervals | None = None) -> dict[str, Shares]:
        """Busy and wait shares of every process in `window` (default: `steps`)."""
        window = self.steps if window is None else window
        return {name: shares_of(tracks, window) for name, tracks in self.processes.items()}

    def both_busy_share(self, window: Intervals | None = None) -> float:
        """Share of the window, from `whole_ns` on, in which generator and trainer were busy."""
        window = self._whole(self.steps if window is None else window)
        both = intersect(self._busy("generator"), self._busy("trainer"))
        return _share(intersect(both, window), window)

    def tokens_during_publish(self) -> int:
        """Tokens decoded, from `whole_ns` on, while a publish was under way; a span partly inside
        counts partly."""
        publishing = union(
            _concatenate(
                [
                    track.intervals()
                    for tracks in self.processes.values()
                    for (cat, name), track in tracks.items()
                    if (cat, name) == ("publish", "publish")
                ]
            )
        )
        num_tokens = 0.0
        for tracks in self.processes.values():
            if ("busy", "decode") in tracks:
                decode = tracks["busy", "decode"]
                spans = decode.intervals()
                inside = overlaps(self._whole(publishing), spans) / np.maximum(
                    spans[:, 1] - spans[:, 0], 1
                )
                num_tokens += float(inside @ np.array(decode.tokens, dtype=np.int64))
        return round(num_tokens)

    def _whole(self, window: Intervals) -> Intervals:
        return intersect(window, np.array([[self.whole_ns, LAST_NS]]))

    def _busy(self, executor: str) -> Intervals:
        return union(
            _concatenate(
                [
                    track.intervals()
                    for process, tracks in self.processes.items()
                    if executor_of(process) == executor
                    for (cat, _), track in tracks.items()
                    if cat == "busy"
                ]
            )
        )


def executor_of(process: str) -> str:
    """`generator-0` and `generator-0-1` (rank 1 of replica 0) -> `generator`."""
    return process.partition("-")[0]


def read_timeline(
    folder: str | Path, see: Callable[[str, Span], None] = lambda process, span: None
) -> RunTimeline:
    """Read the span files of all processes in `folder`; no file at all gives an empty timeline.

    `see` is called with each process and span on the way: to read them again would take as long.
    """
    processes: dict[str, Tracks] = {}
    steps: dict[tuple[str, int], list[int]] = {}
    sessions: list[Intervals] = []
    whole_ns = 0
    for path in span_files(folder):
        tracks: Tracks = defaultdict(Track)
        extents: dict[tuple[str, int], list[int]] = {}
        reader = SpanReader(path)
        for span in reader.read():
            see(reader.process, span)
            if span.is_sum:
                whole_ns = max(whole_ns, span.end_ns)
            track = tracks[span.cat, span.name]
            track.times_ns.extend((span.start_ns, span.end_ns))
            if span.name == "decode":
                track.tokens.append(span.args.get("tokens", 0))
            key = (reader.process, span.session)
            _stretch(extents, key, span.start_ns, span.end_ns)
            if (span.cat, span.name) == ("mark", "step"):
                _stretch(steps, key, span.start_ns, span.end_ns)
        processes[reader.process] = dict(tracks)
        sessions.append(_as_intervals(extents))
    steps_ns, sessions_ns = union(_as_intervals(steps)), union(_concatenate(sessions))
    return RunTimeline(processes, steps_ns, sessions_ns, whole_ns)


def by_executor(shares: dict[str, Shares]) -> dict[str, Shares]:
    """Mean of the shares over the processes of each executor."""
    members: dict[str, list[Shares]] = defaultdict(list)
    for process, share in shares.items():
        members[executor_of(process)].append(share)
    result = {}
    for executor, parts in sorted(members.items()):
        waits: dict[str, float] = defaultdict(float)
        for part in parts:
            for reason, share_of_time in part.waits.items():
                waits[reason] += share_of_time / len(parts)
        result[executor] = Shares(sum(part.busy for part in parts) / len(parts), dict(waits))
    return result


def shares_of(tracks: Tracks, window: Intervals) -> Shares:
    """Busy time wins over waiting, and a wait over those whose names come later."""
    taken = union(_concatenate([t.intervals() for (cat, _), t in tracks.items() if cat == "busy"]))
    busy = _share(intersect(taken, window), window)
    waits = {}
    for (cat, name), track in sorted(tracks.items()):
        if cat == "wait":
            own = subtract(union(track.intervals()), taken)
            waits[name] = _share(intersect(own, window), window)
            taken = union(_concatenate([taken, own]))
    return Shares(busy, waits)


def _share(part: Intervals, whole: Intervals) -> float:
    return length(part) / length(whole) if len(whole) else 0.0


def _concatenate(parts: list[Intervals]) -> Intervals:
    return np.concatenate([EMPTY, *parts])


def _stretch(
    extents: dict[tuple[str, int], list[int]], key: tuple[str, int], start_ns: int, end_ns: int
) -> None:
    extent = extents.setdefault(key, [start_ns, end_ns])
    extent[0], extent[1] = min(extent[0], start_ns), max(extent[1], end_ns)


def _as_intervals(extents: dict[tuple[str, int], list[int]]) -> npt.NDArray[np.int64]:
    return np.array(list(extents.values()), dtype=np.int64).reshape(-1, 2)
