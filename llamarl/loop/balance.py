"""Which live replica gets which request.

Owns: what each replica serves and holds, and the choice. Does not own: when a replica comes, is
lost or stops a rollout (`dispatch.py`), or the bound (`gate.py`). Invariant: a request is given to
a replica that is live at that moment, and rollouts of one prompt stay together, so that they share
its prefill.

Where lengths are expected (`skew.py`), StreamRL's Algorithm 2 assigns a whole step's groups: the
longest may get replicas of their own, and within either set the longest group goes first, to the
replica with the least to write. The algorithm counts on replicas that are idle when a step begins
(S = 0): where they still write an earlier step, sets of replicas that do not share their work cost
more than they gain, and each group goes to the replica with the least to write, the longest first.
"""

import heapq
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import groupby

from llamarl.config import DispatchConfig
from llamarl.lengths.split import Limits
from llamarl.loop.nearby_units import Neighbours
from llamarl.loop.skew import Skew
from llamarl.loop.speeds import Speeds
from llamarl.protocols import GeneratorReplica
from llamarl.types import Purpose, Request, RolloutInfo

IDLE_SHARE = 0.1  # of a step's rollouts, which idle replicas hold at most when it begins
BEHIND_SHARE = 0.25  # by which a replica that has yet to commit counts as more loaded than it is


@dataclass(slots=True)
class Replica:
    """One engine: its handle, the version it serves, and the requests it holds. `received` is the
    number of the next row that it reports.

    `load` is the number of tokens it will probably write, or may write where nothing is expected: a
    replica is late with long rollouts more than with many.
    """

    generator: GeneratorReplica
    version: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    load: int = 0
    received: int = 0

    def hold(self, request: Request) -> None:
        self.running[request.row_id] = request
        self.load += tokens_of(request)

    @property
    def is_busy(self) -> bool:
        """Whether some request that it holds need not wait for a version."""
        return any(each.min_version <= self.version for each in self.running.values())

    def release(self, row_id: int) -> Request | None:
        """The request, if it was held here."""
        request = self.running.pop(row_id, None)
        self.load -= tokens_of(request) if request else 0
        return request


def tokens_of(request: Request) -> int:
    """What a rollout counts as."""
    return request.expected_tokens or request.sampling.max_tokens


Queues = dict[tuple[int, bool, frozenset[int] | None], list[tuple[bool, float, int]]]
"""(oldest version, whether it is an evaluation, replicas to choose from; None: all) -> a heap of
these by how well they suit."""


class Balance:
    """The live `replicas` by index, and the choice among them.

    Example: with replicas {0: 10 requests, 1: 4 requests} of equal length, the next group of 8 goes
    to replica 1. A replica that is one version below the group's `min_version` is about to commit:
    it counts as more loaded than it is, by `BEHIND_SHARE`, and holds the group until it does. One
    that is further behind, or keeps its version, is chosen only if all are. Without `neighbours`
    all is on one host; without `skew` nothing is expected of lengths. Of replicas that are not
    equally fast (`speeds`), the one suits best that would have written the next group first.
    """

    def __init__(
        self,
        neighbours: Neighbours | None = None,
        skew: Skew | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        self.replicas: dict[int, Replica] = {}
        self.keepers: set[int] = set()
        """Replicas that keep their version for an evaluation, which goes to them alone."""
        self.draining: set[int] = set()
        """Replicas that get no more requests."""
        self._neighbours = neighbours or Neighbours({}, 1)
        self._speeds = speeds or Speeds()
        self._group_load = 1  # of the last group that was spread
        self._next_load = 0  # that counts beside what a replica holds, while requests are spread
        nothing = DispatchConfig(ranker="none"), Limits(max_num_seqs=1)
        self._skew = skew or Skew(*nothing)
        self._for_long = self._for_rest = frozenset[int]()  # replicas; none: all take all

    def spread(self, requests: list[Request]) -> tuple[dict[int, list[Request]], list[Request]]:
        """Give each run of equal prompts to the replica that suits it best, which then holds it.

        Returns the requests by replica, and those that no live replica can take: all if there is
        none, an evaluation's if none keeps its version.
        """
        shares: dict[int, list[Request]] = {}
        left: list[Request] = []
        queues: Queues = {}
        self._next_load = self._group_load if self._speeds.is_on else 0
        for group in self._order(self._skew.expect(requests)):
            is_evaluation = group[0].purpose is Purpose.EVALUATE
            if not (self.keepers & self.replicas.keys() if is_evaluation else self._open):
                left += group
                continue
            index = self._choose(queues, group)
            for request in group:
                self.hold(index, request)
            shares.setdefault(index, []).extend(group)
        return shares, left

    @property
    def busy_share(self) -> float:
        """Share of the replicas that hold a rollout which they may write."""
        replicas = self.replicas.values()
        return sum(each.is_busy for each in replicas) / len(replicas) if replicas else 1.0

    @property
    def _open(self) -> Set[int]:
        """Replicas that get requests: not those that are being drained, unless all are."""
        replicas = self.replicas.keys()
        return (replicas - self.draining or replicas) if self.draining else replicas

    def hold(self, index: int, request: Request) -> None:
        """This replica gets the request."""
        self._speeds.note(index, len(self.replicas[index].running))
        self.replicas[index].hold(request)

    def release(self, index: int, row: RolloutInfo) -> bool:
        """True if the rollout, which has stopped, was held by this replica."""
        if (replica := self.replicas.get(index)) is None:
            return False
        self._speeds.note(index, len(replica.running))
        if (request := replica.release(row.row_id)) is None:
            return False
        self._skew.observe(request, row)
        self._speeds.observe(index, request, row)
        return True

    def _order(self, requests: list[Request]) -> Iterator[list[Request]]:
        """The groups, each step's longest first; before a whole step's, replicas are split."""
        runs = groupby(requests, key=lambda r: (r.prompt_ids, r.purpose))
        groups = sorted((list(run) for _, run in runs), key=lambda g: min(r.urgency for r in g))
        for _, run in groupby(groups, key=lambda group: (group[0].purpose, group[0].step)):
            some = list(run)
            first = some[0][0]
            is_step = first.purpose is Purpose.TRAIN and len(some) >= max(2, len(self._open))
            if is_step and not first.resume:
                num_held = sum(len(replica.running) for replica in self.replicas.values())
                # A split is searched for replicas that are alike.
                is_idle = not self._speeds.is_on and num_held <= IDLE_SHARE * sum(map(len, some))
                self._skew.plan(some, len(self._open), may_split=is_idle)
                num_long = self._skew.split.num_long
                order = sorted(self._open, key=lambda index: (index in self.keepers, index))
                self._for_long = frozenset(order[:num_long])
                self._for_rest = frozenset(order[num_long:] if num_long else ())
            yield from some

    def plan_units(self, num_groups: int) -> list[int | None]:
        """The storage unit for each of the groups that are submitted next: one on the host of the
        replica that has least to do then. None where it does not matter."""
        if not self._neighbours or not self.replicas:
            return [None] * num_groups
        speeds = {index: self._speeds.of(index) for index in self.replicas}
        loads = [(each.load / speeds[index], index) for index, each in self.replicas.items()]
        heapq.heapify(loads)
        units: list[int | None] = []
        for _ in range(num_groups):
            load, index = loads[0]
            units.append(self._neighbours.unit_of(index))
            heapq.heapreplace(loads, (load + self._group_load / speeds[index], index))
        return units

    def unit_near(self, index: int) -> int | None:
        """A storage unit on this replica's host. None where it does not matter."""
        return self._neighbours.unit_of(index) if self._neighbours else None

    def _choose(self, queues: Queues, group: list[Request]) -> int:
        """The replica that suits best; one on the host of the group's storage unit, if it suits as
        well, or has at most this group more to write."""
        is_evaluation = group[0].purpose is Purpose.EVALUATE
        kind = max(request.min_version for request in group), is_evaluation
        best = self._find_best(queues, kind, None)
        assert best is not None  # `spread` asks only if some replica may take the group
        load = sum(map(tokens_of, group))
        some = None
        if not is_evaluation:
            self._group_load = load
            some = self._side(group)
        if some and best[2] not in some:
            inside = self._find_best(queues, kind, some)
            if inside and inside[0] <= best[0]:
                best = inside
        near = self._neighbours.near(group[0].row_id)
        if near and best[2] not in near:
            there = self._find_best(queues, kind, frozenset(near & some if some else near))
            if there and self._is_close(there, best, load):
                return there[2]
        return best[2]

    def _is_close(
        self, other: tuple[bool, float, int], best: tuple[bool, float, int], load: int
    ) -> bool:
        """Whether a replica suits as well as the best one, or has at most `load` more to write."""
        return other[0] <= best[0] and other[1] <= best[1] + load / self._speeds.of(other[2])

    def _side(self, group: list[Request]) -> frozenset[int]:
        """The replicas that groups as long as this one are for; none: all."""
        is_long = max(r.expected_tokens for r in group) >= self._skew.split.long_from
        return self._for_long if is_long else self._for_rest

    def _find_best(
        self, queues: Queues, kind: tuple[int, bool], some: frozenset[int] | None
    ) -> tuple[bool, float, int] | None:
        """The rank of the best of all replicas, or of `some`; None if there are none. `queues` is
        empty when a `submit` begins. Loads only grow during one, so an entry of a heap may be too
        low but never too high."""
        min_version, is_evaluation = kind
        queue = queues.get((*kind, some))
        if queue is None:
            candidates = self.keepers if is_evaluation else self._open
            live = candidates & (
                self.replicas.keys() if some is None else some & self.replicas.keys()
            )
            queue = queues[*kind, some] = [self._rank(index, min_version) for index in live]
            heapq.heapify(queue)
        while queue and queue[0] != (found := self._rank(queue[0][2], min_version)):
            heapq.heapreplace(queue, found)
        return queue[0] if queue else None

    def _rank(self, index: int, min_version: int) -> tuple[bool, float, int]:
        replica = self.replicas[index]
        num_behind = max(0, min_version - replica.version)
        is_far = num_behind > (index not in self.keepers)
        load = (replica.load + self._next_load) / self._speeds.of(index)
        return is_far, load * (1 + BEHIND_SHARE * num_behind), index
