"""Which source feeds which replica: each byte leaves the trainer once per host.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b

The trainer feeds the head of each host, and the head feeds its siblings. The head is the replica
that joined first of those that are left, so when it leaves the next one succeeds it. A replica
over several hosts is fed by the trainer.
"""

from llamarl.weights.layout.boxes import RankLayout

Place = tuple[str | int, ...]
"""Replicas of one place can pass weights on: a host, or a replica over several hosts."""


class Assignment:
    """Sources of the replicas that have joined and not left."""

    def __init__(self) -> None:
        self._siblings: dict[Place, list[int]] = {}  # in the order they joined
        self._place: dict[int, Place] = {}

    def join(self, replica: int, layouts: list[RankLayout]) -> None:
        """A replica whose ranks have these layouts is to be fed from now on."""
        hosts = sorted({layout.host for layout in layouts})
        place: Place = (hosts[0],) if len(hosts) == 1 else (replica, *hosts)
        self._place[replica] = place
        self._siblings.setdefault(place, []).append(replica)

    def leave(self, replica: int) -> None:
        """This replica neither feeds nor is fed any more; no effect if it has not joined."""
        if replica in self._place:
            self._siblings[self._place.pop(replica)].remove(replica)

    def source_of(self, replica: int) -> int | None:
        """The replica that feeds this one, or None for the trainer."""
        head = self._siblings[self._place[replica]][0]
        return None if head == replica else head
