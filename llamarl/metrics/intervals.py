"""Sets of time as sorted, disjoint intervals.

Owns: union, intersection, difference and length. Does not own: where the times come from.
Invariant: results are int64 [n, 2] rows (start, stop), sorted, disjoint, none empty; so are
arguments, except those of `union`.
"""

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]

EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)


def union(intervals: Intervals) -> Intervals:
    """The set covered by any of these intervals; [n, 2] in any order, overlapping or empty."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return EMPTY
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.r_[True, intervals[1:, 0] > reached[:-1]])
    last = np.r_[first[1:] - 1, len(intervals) - 1]
    return np.stack([intervals[first, 0], reached[last]], axis=1)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The set covered by both."""
    return _part(a, b, inside=True)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The set covered by `a` and not by `b`."""
    return _part(a, b, inside=False)


def length(a: Intervals) -> int:
    """Total time covered, in the unit of the intervals."""
    return int((a[:, 1] - a[:, 0]).sum())


def overlaps(a: Intervals, spans: Intervals) -> npt.NDArray[np.int64]:
    """For each row of `spans` (any order, may overlap) how much of it `a` covers, [n]."""
    if not len(a):
        return np.zeros(len(spans), dtype=np.int64)
    covered_before = np.r_[0, np.cumsum(a[:, 1] - a[:, 0])]

    def covered_until(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        index = np.searchsorted(a[:, 0], times, side="right")
        overshoot = np.maximum(a[index - 1, 1] - times, 0)
        return np.where(index == 0, 0, covered_before[index] - overshoot)

    return covered_until(spans[:, 1]) - covered_until(spans[:, 0])


def _part(a: Intervals, b: Intervals, *, inside: bool) -> Intervals:
    """What of `a` is inside `b`, or outside: time is cut at every start and stop."""
    times = np.unique(np.concatenate([a, b]))
    pieces = np.stack([times[:-1], times[1:]], axis=1)
    return union(pieces[(overlaps(a, pieces) > 0) & ((overlaps(b, pieces) > 0) == inside)])
