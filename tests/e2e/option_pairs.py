"""Few cases in which every pair of two options' values occurs at least once.

A defect that needs two options at once is met so without running all combinations of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Case = dict[str, str]
"""A value per option."""
Pair = frozenset[tuple[str, str]]
"""Two options with a value each."""
TRIES = 20  # cases made for each that is taken


def pair(*values: tuple[str, str]) -> Pair:
    return frozenset(values)


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    return set(map(frozenset, combinations(case.items(), 2)))


def all_pairs(options: Mapping[str, Sequence[str]]) -> set[Pair]:
    return {
        pair((a, one), (b, other))
        for a, b in combinations(options, 2)
        for one in options[a]
        for other in options[b]
    }


def cover(
    options: Mapping[str, Sequence[str]], refused: Iterable[Pair], seed: int
) -> tuple[list[Case], set[Pair]]:
    """(cases without a refused pair, the pairs that no case has found room for)."""
    rng, refused = random.Random(seed), set(refused)
    left, impossible = all_pairs(options) - refused, set[Pair]()
    cases = []
    while left:
        first = min(left, key=sorted)
        made = [_extend(first, options, refused, left, rng) for _ in range(TRIES)]
        if not any(made):
            impossible.add(first)
            left.remove(first)
            continue
        best = max(made, key=lambda case: len(pairs_of(case) & left))
        cases.append({option: best[option] for option in options})
        left -= pairs_of(best)
    return cases, impossible


def _extend(
    first: Pair,
    options: Mapping[str, Sequence[str]],
    refused: set[Pair],
    left: set[Pair],
    rng: random.Random,
) -> Case:
    """A case with the pair `first`; {} if the options, drawn in this order, left none."""
    case: Case = dict(first)
    for option in rng.sample([*options], len(options)):
        if option in case:
            continue
        news = {
            value: {pair((option, value), other) for other in case.items()}
            for value in rng.sample([*options[option]], len(options[option]))
        }
        allowed = [value for value, new in news.items() if not new & refused]
        if not allowed:
            return {}
        case[option] = max(allowed, key=lambda value: len(news[value] & left))
    return case
