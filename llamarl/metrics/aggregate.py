"""What the processes of a run did with their time, computed from their span files.

Owns: busy and wait shares, overlap of generator and trainer, tokens written during publishes, and
the same shares while the run is going on. Does not own: the files (`span.py`) or what is shown.
Invariant: for each process busy and wait shares are disjoint, so they sum to at most 1.

An executor's processes are named `<executor>-<number>`, with a rank behind it if need be; its
shares are the mean over them.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamarl.metrics.intervals import EMPTY, Intervals, intersect, length, overlaps, subtract, union
from llamarl.metrics.span import Span, SpanReader, span_files

LIVE_WINDOW_NS = 10 * 10**9
MOST_TAILS = 64  # files of an executor that are read while the run goes on; means need no more


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
class Timeline:
    """All spans of a run by process, and the extents of its sessions.

    `steps` is the set of time from the first to the last `step` mark, one interval per session (a
    resumed run has several). `sessions` reaches from the first process's start to the last span.
    """

    processes: dict[str, Tracks]
    steps: Intervals
    sessions: Intervals

    def shares(self, window: Intervals | None = None) -> dict[str, Shares]:
        """Busy and wait shares of every process in `window` (default: `steps`)."""
        window = self.steps if window is None else window
        return {name: _shares(tracks, window) for name, tracks in self.processes.items()}

    def both_busy_share(self, window: Intervals | None = None) -> float:
        """Share of the window in which a generator process and a trainer process were busy."""
        window = self.steps if window is None else window
        both = intersect(self._busy("generator"), self._busy("trainer"))
        return _share(intersect(both, window), window)

    def tokens_during_publish(self) -> int:
        """Tokens decoded while a publish was under way; a span partly inside counts partly."""
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
                inside = overlaps(publishing, spans) / np.maximum(spans[:, 1] - spans[:, 0], 1)
                num_tokens += float(inside @ np.array(decode.tokens, dtype=np.int64))
        return round(num_tokens)

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


def read_timeline(folder: str | Path) -> Timeline:
    """Read the span files of all processes in `folder`; no file at all gives an empty timeline."""
    processes: dict[str, Tracks] = {}
    steps: dict[tuple[str, int], list[int]] = {}
    sessions: list[Intervals] = []
    for path in span_files(folder):
        tracks: Tracks = defaultdict(Track)
        extents: dict[tuple[str, int], list[int]] = {}
        reader = SpanReader(path)
        for span in reader.read():
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
    return Timeline(processes, union(_as_intervals(steps)), union(_concatenate(sessions)))


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


class SpanTails:
    """Reads what the span files of the processes have gained since last asked: of an executor with
    more than `MOST_TAILS` those of so many, evenly spread, and always the same.

    A span appears once it has ended and its process has flushed it.
    """

    def __init__(self, folder: str | Path, since_ns: int | None = None) -> None:
        """Leave out spans that ended before `since_ns` (Unix; default now): older sessions'."""
        self.since_ns = time.time_ns() if since_ns is None else since_ns
        self._folder = Path(folder)
        self._readers: dict[str, SpanReader] = {}
        self._files: dict[str, int] = {}  # by executor, how many are read
        self._seen: set[str] = set()

    def read(self) -> Iterator[tuple[str, Span]]:
        """(process, span) of each new busy or wait span."""
        self._choose()
        for process, reader in self._readers.items():
            for span in reader.read():
                if span.end_ns >= self.since_ns and span.cat in ("busy", "wait"):
                    yield process, span

    def _choose(self) -> None:
        """Among the files that are new."""
        new: dict[str, list[Path]] = defaultdict(list)
        for path in span_files(self._folder):
            if path.stem not in self._seen:
                new[executor_of(path.stem)].append(path)
                self._seen.add(path.stem)
        for executor, paths in new.items():
            room = MOST_TAILS - self._files.get(executor, 0)
            chosen = paths[:: math.ceil(len(paths) / room)] if room else []
            self._readers |= {path.stem: SpanReader(path) for path in chosen}
            self._files[executor] = self._files.get(executor, 0) + len(chosen)


class LiveShares:
    """Busy and wait shares of the last seconds while the run goes on.

    Each process's window ends at its newest span known; a wait that lasts still is not in it.
    """

    def __init__(self, tails: SpanTails) -> None:
        self._tails = tails
        self._processes: dict[str, Tracks] = {}

    def poll(self) -> dict[str, Shares]:
        """Shares by executor over the last ten seconds."""
        for process, span in self._tails.read():
            tracks = self._processes.setdefault(process, {})
            track = tracks.setdefault((span.cat, span.name), Track())
            track.times_ns.extend((span.start_ns, span.end_ns))
        shares = {}
        for process, tracks in self._processes.items():
            newest_ns = max((track.times_ns[-1] for track in tracks.values()), default=0)
            oldest_ns = max(newest_ns - LIVE_WINDOW_NS, self._tails.since_ns)
            _forget_before(tracks, oldest_ns)
            shares[process] = _shares(tracks, union(np.array([[oldest_ns, newest_ns]])))
        return by_executor(shares)


class LiveWaits:
    """Seconds waited, step by step, while the run goes on."""

    def __init__(self, tails: SpanTails) -> None:
        self._tails = tails
        self._waited_ns: dict[str, int] = {}

    def take_s(self) -> dict[str, float]:
        """Executor -> seconds waited (mean over its processes) in waits heard of since last asked.

        Overlapping waits of one process count each.
        """
        for process, span in self._tails.read():
            waited_ns = span.end_ns - span.start_ns if span.cat == "wait" else 0
            self._waited_ns[process] = self._waited_ns.get(process, 0) + waited_ns
        members: dict[str, list[float]] = defaultdict(list)
        for process, waited_ns in self._waited_ns.items():
            members[executor_of(process)].append(waited_ns / 1e9)
            self._waited_ns[process] = 0
        return {executor: sum(waits) / len(waits) for executor, waits in members.items()}


def _shares(tracks: Tracks, window: Intervals) -> Shares:
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


def _forget_before(tracks: Tracks, time_ns: int) -> None:
    for key, track in list(tracks.items()):
        times_ns = track.intervals()
        kept = times_ns[times_ns[:, 1] > time_ns]
        if len(kept):
            track.times_ns = array("q", kept.tobytes())
        else:
            del tracks[key]


def _concatenate(parts: list[Intervals]) -> Intervals:
    return np.concatenate([EMPTY, *parts])


def _stretch(
    extents: dict[tuple[str, int], list[int]], key: tuple[str, int], start_ns: int, end_ns: int
) -> None:
    extent = extents.setdefault(key, [start_ns, end_ns])
    extent[0], extent[1] = min(extent[0], start_ns), max(extent[1], end_ns)


def _as_intervals(extents: dict[tuple[str, int], list[int]]) -> npt.NDArray[np.int64]:
    return np.array(list(extents.values()), dtype=np.int64).reshape(-1, 2)
