"""Sets of intervals of time, and estimates of shares: accuracy, pass@k, maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamarl.core.groups import Share

Intervals = NDArray[np.int64]
EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)


def union(intervals: Intervals) -> Intervals:
    """Return the set covered by any of these intervals; [n, 2] in any order, overlapping or
    empty."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return EMPTY
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.r_[True, intervals[1:, 0] > reached[:-1]])
    last = np.r_[first[1:] - 1, len(intervals) - 1]
    return np.stack([intervals[first, 0], reached[last]], axis=1)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the set covered by both."""
    return _part(a, b, inside=True)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the set covered by `a` and not by `b`."""
    return _part(a, b, inside=False)


def length(a: Intervals) -> int:
    """Return the total time covered, in the unit of the intervals."""
    return int((a[:, 1] - a[:, 0]).sum())


def overlaps(a: Intervals, spans: Intervals) -> NDArray[np.int64]:
    """Return, for each row of `spans` (any order, may overlap), how much of it `a` covers, [n]."""
    if not len(a):
        return np.zeros(len(spans), dtype=np.int64)
    covered_before = np.r_[0, np.cumsum(a[:, 1] - a[:, 0])]

    def covered_until(times: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(a[:, 0], times, side="right")
        overshoot = np.maximum(a[index - 1, 1] - times, 0)
        return np.where(index == 0, 0, covered_before[index] - overshoot)

    return covered_until(spans[:, 1]) - covered_until(spans[:, 0])


def _part(a: Intervals, b: Intervals, *, inside: bool) -> Intervals:
    """Return the part of `a` that is inside `b`, or outside: time is cut at every start and
    stop."""
    times = np.unique(np.concatenate([a, b]))
    pieces = np.stack([times[:-1], times[1:]], axis=1)
    return union(pieces[(overlaps(a, pieces) > 0) & ((overlaps(b, pieces) > 0) == inside)])


Z_95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


def pass_at(k: int, num_samples: int, num_correct: int) -> float:
    """Return the probability that one of k samples is correct, from n of which c are: 1 - C(n - c,
    k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at(k: int, answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Return the probability that the most frequent answer of k samples is correct, over all
    choices of k of these n samples; answers that are equally frequent win equally often.

    A sample without an answer (None) has no voice, and k samples without any answer are wrong. With
    f_a = c_a / n_a, the share of correct ones among those that answer a, it is

        sum over a, m, t of  f_a C(n_a, m) W(a, m, t) / (1 + t) / C(n, k)

    where W counts the choices of k - m of the other samples in which t other answers come m times
    and none comes more often."""
    sizes = Counter(answer for answer in answers if answer is not None)
    right: Counter[int] = Counter()  # samples, by how frequent their answer is: such win alike
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None and is_correct:
            right[sizes[answer]] += 1
    num_silent = len(answers) - sizes.total()
    total = 0.0
    for size, num_correct in right.items():
        others = [*sizes.values()]
        others.remove(size)
        for m in range(1, min(size, k) + 1):
            ways = _ways(others, num_silent, m, k - m)
            won = float((ways / np.arange(1, len(ways) + 1)).sum())
            total += num_correct / size * math.comb(size, m) * won
    return total / math.comb(len(answers), k)


def _ways(sizes: Sequence[int], num_silent: int, m: int, count: int) -> NDArray[np.float64]:
    """Return W(t): the choices of `count` samples, at most m of each answer and any of the silent,
    in which t answers come m times; [count // m + 1]."""
    ways = np.zeros((count // m + 1, count + 1))  # by t, and how many are chosen
    for i in range(min(num_silent, count) + 1):
        ways[0, i] = math.comb(num_silent, i)
    for size in sizes:
        before, ways = ways, np.zeros_like(ways)
        for i in range(min(size, m, count) + 1):
            chosen = math.comb(size, i) * before[:, : count + 1 - i]
            if i < m:
                ways[:, i:] += chosen
            else:
                ways[1:, i:] += chosen[:-1]
    found: NDArray[np.float64] = ways[:, count]
    return found


def effective_count(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Return how many independent samples say as much about a share as these, which come by prompt:
    the `sums` of values from 0 to 1, and how many values each sum has.

    Samples of one prompt are alike, so n samples of each of P prompts say less than n P. The share
    p = sum(s_i) / sum(m_i) has, over prompts, the variance

        V = P / (P - 1) sum((s_i - p m_i)^2) / sum(m_i)^2

    and p (1 - p) / V is the count (Korn and Graubard 1998), at least the number of prompts and at
    most that of samples. With one sample per prompt it is their number."""
    values, sizes = np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64)
    num_prompts, num_samples = len(values), float(sizes.sum())
    share = values.sum() / num_samples
    spread = float(((values - share * sizes) ** 2).sum())
    if num_prompts < 2 or not spread:
        return float(num_prompts)
    variance = num_prompts / (num_prompts - 1) * spread / num_samples**2
    return float(np.clip(share * (1 - share) / variance, num_prompts, num_samples))


def interval(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` independent samples, within 0 and 1.

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)"""
    spread = Z_95 * math.sqrt(max(0.0, share * (1 - share)) / count + Z_95**2 / (4 * count**2))
    centre, scale = share + Z_95**2 / (2 * count), 1 + Z_95**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def share_of(sums: Sequence[float], counts: Sequence[int]) -> Share:
    """Return the share with its interval, from a sum and a count per prompt: see
    `effective_count`."""
    value = sum(sums) / sum(counts)
    return Share(value, *interval(value, effective_count(sums, counts)))


def with_interval(share: Share, of: str = "") -> str:
    """Return words such as "98.4% of 512 (97.0% to 99.2%)"."""
    return f"{share.value:.1%}{of and f' of {of}'} ({share.low:.1%} to {share.high:.1%})"


def with_margin(share: Share) -> str:
    """Return words such as "98.4% +-1.4": the longer of the two distances to the interval's
    ends."""
    margin = max(share.value - share.low, share.high - share.value)
    return f"{share.value:.1%} +-{100 * margin:.1f}"
