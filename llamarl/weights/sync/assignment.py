"""Which source feeds which replica: each byte leaves the trainer once per host of its site, and
once per other site.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b
            -> head of the site of hosts c and d -> the other replicas of host c
                                                 -> head of host d -> the others of host d

A head is the replica of its host or site that joined first of those that are left, so when it
leaves the next one succeeds it. A replica over several hosts is a host of its own.
"""

from collections.abc import Mapping

from llamarl.weights.layout.boxes import RankLayout


def assign_sources(
    layouts: Mapping[int, list[RankLayout]], far_sites: Mapping[str, str]
) -> dict[int, int | None]:
    """Replica -> the replica that feeds it, None for the trainer.

    `layouts` are those of each replica's ranks, the replicas in the order they joined; `far_sites`
    host -> site, of hosts at other sites than the trainer's.
    """
    sources: dict[int, int | None] = {}
    heads: dict[str, int] = {}  # by host
    site_heads: dict[str, int] = {}
    for replica, ranks in layouts.items():
        hosts = {layout.host for layout in ranks}
        site = far_sites.get(ranks[0].host)
        head = heads.setdefault(hosts.pop(), replica) if len(hosts) == 1 else replica
        if head == replica and site is not None:
            head = site_heads.setdefault(site, replica)
        sources[replica] = None if head == replica else head
    return sources
