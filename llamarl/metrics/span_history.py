"""Old spans of a long run as sums, so that a process's span file stays small.

Owns: which spans are summed, and what is kept of them. Does not own: when (`span.py`) or the file
format (`span_file.py`). Invariant: busy time, wait time, counts and bytes of each name are exact in
every bin, and so in every window that is made of bins; only where in its bin a span lay is lost.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.metrics.intervals import EMPTY, Intervals, overlaps, subtract, union
from llamarl.metrics.span_file import BYTES, COUNTS, Span, SpanParser, head_line, read_head

MIN_BIN_NS = 10**9
BIN_BYTES = 1024  # about what the lines of one bin take
# Shares of a file's limit. The old file and the new one exist together for a moment.
FULL_SHARE = 1 / 2  # when old spans are summed
KEPT_SHARE = 1 / 4  # the newest spans, which stay as they are
SUMS_SHARE = 1 / 8

Counted = tuple[Counter[str], Counter[str]]
"""The counts of some spans, and their bytes by column."""


def sum_old_spans(path: Path, limit_bytes: int) -> int:
    """Replace all but the newest spans of a span file by sums, in one move; its new size.

    The file must not be written to before it returns.
    """
    with path.open("rb") as file:
        num_summed, head_bytes = read_head(file)
        file.seek(0)
        data = file.read()
    newest = max(0, len(data) - int(limit_bytes * KEPT_SHARE))
    cut = max(head_bytes, data.rfind(b"\n", 0, newest) + 1)
    parser = SpanParser()
    parsed = (parser.parse(line) for line in data[:cut].split(b"\n"))
    max_bins = int(limit_bytes * SUMS_SHARE) // BIN_BYTES
    sums = summed((span for span in parsed if span is not None), max_bins)
    lines = [json.dumps(line) + "\n" for line in _lines(path.stem, sums, parser)]
    head_size = len(head_line(0, 0)) + sum(map(len, lines))
    head = head_line(num_summed + cut - head_bytes, head_size) + "".join(lines)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(head.encode() + data[cut:])
    os.replace(unfinished, path)
    return head_size + len(data) - cut


def summed(spans: Iterable[Span], max_bins: int) -> list[list[Span]]:
    """By session, the sums of these spans: at most one per bin, category and name.

    A bin is one second long, doubled until about `max_bins` are enough.
    """
    sessions: dict[int, dict[tuple[str, str], list[Span]]] = {}
    for span in spans:
        tracks = sessions.setdefault(span.session, defaultdict(list))
        tracks[span.cat, span.name].append(span)
    extents = {number: _extent(tracks) for number, tracks in sessions.items()}
    width_ns = MIN_BIN_NS
    while sum((end - start) // width_ns for start, end in extents.values()) > max(1, max_bins):
        width_ns *= 2
    return [
        list(_sum_session(number, tracks, extents[number], width_ns))
        for number, tracks in sorted(sessions.items())
    ]


def _sum_session(
    number: int,
    tracks: dict[tuple[str, str], list[Span]],
    extent: tuple[int, int],
    width_ns: int,
) -> Iterator[Span]:
    """Busy and wait spans of a bin follow each other, in the precedence of `aggregate.shares_of`;
    other spans begin where the first of them did."""
    first_ns, last_ns = extent
    yield Span(number, "start", "mark", first_ns, first_ns, {"spans": 1})
    edges = np.arange(first_ns // width_ns, last_ns // width_ns + 1, dtype=np.int64) * width_ns
    bins = np.stack([edges, edges + width_ns], axis=1)
    cursors = np.maximum(edges, first_ns)
    taken = EMPTY
    for cat, name in sorted(tracks, key=lambda key: (key[0] not in ("busy", "wait"), key)):
        spans = tracks[cat, name]
        times = np.array([(span.start_ns, span.end_ns) for span in spans], dtype=np.int64)
        own = union(times)
        if cat in ("busy", "wait"):
            own = subtract(own, taken)
            taken = union(np.concatenate([taken, own]))
            starts = cursors
        else:
            starts = _first_moments(own, edges)
        covered = overlaps(own, bins)
        counted = _count(spans, ((times[:, 0] - edges[0]) // width_ns).tolist())
        for i in sorted({*np.flatnonzero(covered).tolist(), *counted}):
            counts, sizes = counted.get(i, (Counter(spans=0), Counter()))
            if not covered[i] and not counts.total() > counts["spans"]:
                continue
            args: dict[str, Any] = dict(counts) | ({BYTES: dict(sizes)} if sizes else {})
            start_ns = int(starts[i])
            yield Span(number, name, cat, start_ns, start_ns + int(covered[i]), args)
        if cat in ("busy", "wait"):
            cursors = cursors + covered


def _count(spans: Sequence[Span], places: Sequence[int]) -> dict[int, Counted]:
    """By place, what is added up of the spans that begin in that bin."""
    found: dict[int, Counted] = defaultdict(lambda: (Counter(), Counter()))
    for span, place in zip(spans, places, strict=True):
        counts, sizes = found[place]
        counts.update({"spans": 1} | {name: span.args[name] for name in COUNTS & span.args.keys()})
        if isinstance(span.args.get(BYTES), dict):
            sizes.update(span.args[BYTES])
    return found


def _extent(tracks: dict[tuple[str, str], list[Span]]) -> tuple[int, int]:
    spans = [span for track in tracks.values() for span in track]
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def _first_moments(own: Intervals, edges: np.ndarray) -> np.ndarray:
    """Where in each bin the first of these intervals begins; any value where none does."""
    if not len(own):
        return edges
    index = np.minimum(np.searchsorted(own[:, 1], edges, side="right"), len(own) - 1)
    return np.maximum(edges, own[index, 0])


def _lines(
    process: str, sessions: list[list[Span]], parser: SpanParser
) -> Iterator[dict[str, object]]:
    """The lines of the sums, then the origin line of the spans that follow them."""
    for spans in sessions:
        yield {"process": process, "unix_minus_monotonic_ns": 0}
        for span in spans:
            times = {"start_ns": span.start_ns, "end_ns": span.end_ns}
            yield {"name": span.name, "cat": span.cat, **times, **span.args}
    offset_ns = parser.unix_minus_monotonic_ns
    is_begun = len(sessions) > parser.session
    yield {"process": process, "unix_minus_monotonic_ns": offset_ns, "goes_on": is_begun}
