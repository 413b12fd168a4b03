"""Routes cut by rank: each rank of an executor is sent its own copies and no others.

Owns: that cut, and its form on the way. Does not own: which copies there are (`reshard.py`).
Invariant: what a rank is sent grows neither with the number of ranks nor with that of layers, but
for what the ranks of the other side have to do with it; who passes it on need not read it.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from llamarl.weights.layout.boxes import Copy, Route


@dataclass(frozen=True, slots=True)
class PackedCopies:
    """The copies of a plan by the rank where they begin, and by the rank where they end."""

    by_source: dict[int, bytes]
    by_target: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class SplitRoute:
    """A route for the ranks of one executor. An argument of a call to all of them: each gets the
    Route that `for_rank` gives (`cluster.executor.SplitArgument`)."""

    route: Route  # without copies
    packed: dict[int, bytes]

    def for_rank(self, rank: int) -> Route:
        """The route as this rank sees it; without copies if none begins or ends there."""
        return replace(self.route, copies=_unpacked(self.packed[rank]) if self.has(rank) else ())

    def for_ranks(self, ranks: range) -> Self:
        """The same for some of the ranks."""
        return replace(self, packed={rank: self.packed[rank] for rank in ranks if self.has(rank)})

    def has(self, rank: int) -> bool:
        """Whether this rank sends or receives anything."""
        return rank in self.packed


def pack(copies: Iterable[Copy]) -> PackedCopies:
    """The copies, cut by rank; those of a pair of ranks keep their order at both ends."""
    by_source: dict[int, list[Copy]] = {}
    by_target: dict[int, list[Copy]] = {}
    for copy in copies:
        by_source.setdefault(copy.source_rank, []).append(copy)
        by_target.setdefault(copy.target_rank, []).append(copy)
    return PackedCopies(
        {rank: _packed(found) for rank, found in sorted(by_source.items())},
        {rank: _packed(found) for rank, found in sorted(by_target.items())},
    )


def split(
    packed: PackedCopies, buckets: tuple[tuple[str, ...], ...], **fields: Any
) -> tuple[SplitRoute, SplitRoute]:
    """(what the source's ranks get, what the target's ranks get). `buckets` are those of the
    target's layouts, `fields` the others of Route."""
    route = Route(
        copies=(),
        sources=tuple(packed.by_source),
        targets=tuple(packed.by_target),
        buckets=buckets if len(buckets) > 1 else (),
        **fields,
    )
    return SplitRoute(route, packed.by_source), SplitRoute(route, packed.by_target)


def _packed(copies: list[Copy]) -> bytes:
    return zlib.compress(json.dumps(copies, separators=(",", ":")).encode(), level=1)


def _unpacked(packed: bytes) -> tuple[Copy, ...]:
    made = json.loads(zlib.decompress(packed))
    return tuple(
        Copy._make(tuple(field) if isinstance(field, list) else field for field in fields)
        for fields in made
    )
