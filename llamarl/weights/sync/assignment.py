"""Which source feeds which replica: each byte leaves the trainer once per host of its site, and
once per other site; where replicas differ in kind, once for each kind of weights.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b
            -> head of the site of hosts c and d -> the other replicas of host c
                                                 -> head of host d -> the others of host d

A head is the replica of its host or site that joined first of those that are left, so when it
leaves the next one succeeds it. A replica over several hosts is a host of its own.
"""

from collections.abc import Callable, Mapping

from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.layout.kinds import WeightKind


def assign_sources(
    layouts: Mapping[int, list[RankLayout]],
    far_sites: Mapping[str, str],
    kind_of: Callable[[int], WeightKind | None] = lambda replica: None,
) -> dict[int, int | None]:
    """Replica -> the replica that feeds it, None for the trainer.

    `layouts` are those of each replica's ranks, the replicas in the order they joined; `far_sites`
    host -> site, of hosts at other sites than the trainer's. A replica is fed by another of its own
    kind alone: a narrower one has fewer bits.
    """
    sources: dict[int, int | None] = {}
    heads: dict[tuple[str, WeightKind | None], int] = {}  # by host
    site_heads: dict[tuple[str, WeightKind | None], int] = {}
    for replica, ranks in layouts.items():
        hosts, kind = {layout.host for layout in ranks}, kind_of(replica)
        site = far_sites.get(ranks[0].host)
        head = heads.setdefault((hosts.pop(), kind), replica) if len(hosts) == 1 else replica
        if head == replica and site is not None:
            head = site_heads.setdefault((site, kind), replica)
        sources[replica] = None if head == replica else head
    return sources
