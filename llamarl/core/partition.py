"""Splits numbers into parts with nearly equal sums. Pure and deterministic."""

import heapq
from bisect import insort
from collections.abc import Sequence

FEW = 32  # parts are inserted one by one where there are this many times as many others
_Part = tuple[float, list[int]]  # sum of costs, positions


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return the positions of `costs` in `num_parts` parts with nearly equal sums, the largest sum
    first.

    The two partial partitions whose sums differ most are merged, the largest sum of one with the
    smallest of the other, until one is left. Costs are 0 or more; a part may be empty.

    Example: `partition([8, 7, 6, 5, 4], 2)` is `[[1, 4, 3], [0, 2]]`, with the sums 16 and 14.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap = [(-costs[i], number, [(costs[i], [i])]) for number, i in enumerate(order)]
    while len(heap) > 1:
        _, number, state = heapq.heappop(heap)
        _, _, other = heap[0]
        state = _merge(state, other, num_parts)
        heapq.heapreplace(heap, (-_spread(state, num_parts), number, state))
    parts = [positions for _, positions in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def partition_in_equal_counts(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return the positions of `costs`, a multiple of `num_parts` of them, in parts of equally many
    with nearly equal sums.

    The costliest goes first, to the part with the smallest sum that is not full. With long tails
    that is closer than differencing, whose partial partitions would all have equal counts.

    Example: `partition_in_equal_counts([9, 4, 4, 3, 1, 1], 2)` is `[[0, 4, 5], [1, 2, 3]]`.
    """
    num_each, rest = divmod(len(costs), num_parts)
    assert rest == 0, (len(costs), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_ = [(0.0, part) for part in range(num_parts)]  # a heap
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(open_)
        parts[part].append(position)
        if len(parts[part]) < num_each:
            heapq.heappush(open_, (load + costs[position], part))
    return parts


def _spread(state: list[_Part], num_parts: int) -> float:
    """Return the largest sum minus the smallest; parts that `state` leaves out are empty."""
    return state[0][0] - (state[-1][0] if len(state) == num_parts else 0)


def _merge(state: list[_Part], other: list[_Part], num_parts: int) -> list[_Part]:
    """Return one partition of both, the largest sum first. It takes over their lists, so neither
    may be used afterwards."""
    if len(state) < len(other):
        state, other = other, state
    first = num_parts - len(other)  # the part of `state` that gets the smallest sum of `other`
    smallest = state[first:]
    del state[first:]
    merged = list(reversed(other))
    for place, (load, positions) in enumerate(smallest):
        more, others = merged[place]
        if len(positions) < len(others):
            positions, others = others, positions
        positions += others
        merged[place] = load + more, positions
    if len(merged) * FEW < len(state):
        for part in merged:
            insort(state, part, key=_descending)
    else:
        state += merged
        state.sort(key=_descending)
    return state


def _descending(part: _Part) -> float:
    return -part[0]
