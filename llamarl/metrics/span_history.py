"""The past of a long run: old spans as sums, so that a process's span files stay small.

Owns: what of old spans is kept. Does not own: when (`span.py`) or the files' format
(`span_file.py`). Invariant: busy and wait time and tokens of each name are exact in every bin, and
so in every window that is made of bins; only where in its bin a span lay is forgotten.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from llamarl.metrics.intervals import EMPTY, Intervals, overlaps, subtract, union
from llamarl.metrics.span_file import Span, full_files, parse_files, past_of

LEAST_BIN_NS = 10**9
BIN_BYTES = 1024  # about what the lines of one bin take
KEPT_FILES = 2  # full files whose spans are kept one by one

Track = list[tuple[int, int, int, int]]  # start, end, tokens, number of spans


def sum_old_files(path: Path, past_bytes: int) -> None:
    """Sum all but the newest full files of `<process>.jsonl` into about `past_bytes`."""
    past, num_past = past_of(path)
    old = full_files(path, num_past)[:-KEPT_FILES]
    if old:
        sources = [past, *old] if past.exists() else old
        sums = summed(parse_files(sources), max_bins=past_bytes // BIN_BYTES)
        unfinished = past.with_name(past.name + ".tmp")
        with unfinished.open("w") as file:
            for line in _lines(path.stem, int(old[-1].suffix[1:]), sums):
                file.write(json.dumps(line) + "\n")
        os.replace(unfinished, past)
    for full in set(full_files(path)) - set(full_files(path, past_of(path)[1])):
        full.unlink()


def summed(spans: Iterable[Span], max_bins: int) -> list[list[Span]]:
    """By session, spans that stand for all of these: at most one per bin, category and name.

    Bins are whole seconds, doubled until about `max_bins` are enough.
    """
    sessions: dict[int, dict[tuple[str, str], Track]] = {}
    for span in spans:
        tracks = sessions.setdefault(span.session, defaultdict(list))
        counts = span.args.get("tokens", 0), span.args.get("spans", 1)
        tracks[span.cat, span.name].append((span.start_ns, span.end_ns, *counts))
    extents = {number: _extent(tracks) for number, tracks in sessions.items()}
    width_ns = LEAST_BIN_NS
    while sum((end - start) // width_ns for start, end in extents.values()) > max(1, max_bins):
        width_ns *= 2
    return [
        list(_sum_session(number, tracks, extents[number], width_ns))
        for number, tracks in sorted(sessions.items())
    ]


def _sum_session(
    number: int,
    tracks: dict[tuple[str, str], Track],
    extent: tuple[int, int],
    width_ns: int,
) -> Iterator[Span]:
    """Busy and wait spans of a bin stand end to end, in the order of precedence of
    `aggregate.shares_of`; others begin where the first of them did."""
    first_ns, last_ns = extent
    yield Span(number, "start", "mark", first_ns, first_ns, {"spans": 1})
    edges = np.arange(first_ns // width_ns, last_ns // width_ns + 1, dtype=np.int64) * width_ns
    bins = np.stack([edges, edges + width_ns], axis=1)
    cursors = np.maximum(edges, first_ns)
    taken = EMPTY
    for cat, name in sorted(tracks, key=lambda key: (key[0] not in ("busy", "wait"), key)):
        values = np.array(tracks[cat, name], dtype=np.int64)
        own = union(values[:, :2])
        if cat in ("busy", "wait"):
            own = subtract(own, taken)
            taken = union(np.concatenate([taken, own]))
            starts = cursors
        else:
            starts = _first_moments(own, edges)
        covered = overlaps(own, bins)
        places = (values[:, 0] - edges[0]) // width_ns
        tokens = np.bincount(places, weights=values[:, 2], minlength=len(bins)).astype(np.int64)
        counts = np.bincount(places, weights=values[:, 3], minlength=len(bins)).astype(np.int64)
        for i in np.flatnonzero((covered > 0) | (tokens > 0)).tolist():
            args = {"tokens": int(tokens[i])} if tokens[i] else {}
            start_ns, count = int(starts[i]), int(counts[i])
            end_ns = start_ns + int(covered[i])
            yield Span(number, name, cat, start_ns, end_ns, args | {"spans": count})
        if cat in ("busy", "wait"):
            cursors = cursors + covered


def _extent(tracks: dict[tuple[str, str], Track]) -> tuple[int, int]:
    spans = [span for track in tracks.values() for span in track]
    return min(span[0] for span in spans), max(span[1] for span in spans)


def _first_moments(own: Intervals, edges: np.ndarray) -> np.ndarray:
    """Where in each bin the first of these intervals begins; anything where none does."""
    if not len(own):
        return edges
    index = np.minimum(np.searchsorted(own[:, 1], edges, side="right"), len(own) - 1)
    return np.maximum(edges, own[index, 0])


def _lines(process: str, num_past: int, sessions: list[list[Span]]) -> Iterator[dict[str, object]]:
    yield {"summed_files": num_past}
    for spans in sessions:
        yield {"process": process, "unix_minus_monotonic_ns": 0}
        for span in spans:
            times = {"start_ns": span.start_ns, "end_ns": span.end_ns}
            yield {"name": span.name, "cat": span.cat, **times, **span.args}
