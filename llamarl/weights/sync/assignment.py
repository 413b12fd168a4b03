"""Which source feeds which replica: each byte leaves the trainer once per host.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b

The trainer feeds the head of each host, and the head feeds its siblings. The head is the replica
that joined first of those that are left, so when it leaves the next one succeeds it. A replica
over several hosts is fed by the trainer.
"""

from collections.abc import Mapping

from llamarl.weights.layout.boxes import RankLayout


def assign_sources(layouts: Mapping[int, list[RankLayout]]) -> dict[int, int | None]:
    """Replica -> the replica that feeds it, None for the trainer.

    `layouts` are those of each replica's ranks, the replicas in the order they joined.
    """
    sources: dict[int, int | None] = {}
    heads: dict[str, int] = {}  # by host
    for replica, ranks in layouts.items():
        hosts = {layout.host for layout in ranks}
        head = heads.setdefault(hosts.pop(), replica) if len(hosts) == 1 else replica
        sources[replica] = None if head == replica else head
    return sources
