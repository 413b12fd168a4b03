"""Load balancing over replicas: by the tokens that they have to write, by their speed, by their
host, and with some replicas reserved for long rollouts."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby

from llamarl.controller.lengths import (
    Latency,
    Limits,
    Ranker,
    TailSplit,
    find_split,
    make_ranker,
)
from llamarl.core.config import DispatchConfig
from llamarl.core.config.generator import Pool, number_of
from llamarl.core.faces import GeneratorReplica
from llamarl.core.records import FinishReason, Purpose, Request, RolloutInfo


class RowIds:
    """Gives out the ids from `first` on, of rows that are spread over `num_units` storage units."""

    def __init__(self, first: int, num_units: int) -> None:
        self._next = {id % num_units: id for id in range(first, first + num_units)}  # by unit
        self._turn = first  # which unit is next, where it does not matter

    @property
    def end(self) -> int:
        """The lowest id such that neither it nor any above it was given out."""
        return max(self._next.values()) - len(self._next) + 1

    def take(self, count: int, unit: int | None = None) -> tuple[int, ...]:
        """Return the next `count` ids: of rows in storage unit `unit`, or without one of rows in
        one unit after the other."""
        num_units = len(self._next)
        if unit is not None:
            first, self._next[unit] = self._next[unit], self._next[unit] + count * num_units
            return tuple(range(first, self._next[unit], num_units))
        units = [turn % num_units for turn in range(self._turn, self._turn + count)]
        self._turn += count
        return tuple(row_id for each in units for row_id in self.take(1, each))


class Neighbours:
    """Knows which replicas and storage units are on the same host. `homes` has the units on each
    replica's host; it is empty where all are on one host, since it does not matter there which unit
    a replica uses."""

    def __init__(self, homes: Mapping[int, Sequence[int]], num_units: int) -> None:
        self._homes, self._num_units = homes, num_units
        self._num_given: Counter[tuple[int, ...]] = Counter()  # groups, by the units of a host
        self._near: dict[int, set[int]] = {}
        for replica, units in homes.items():
            for unit in units:
                self._near.setdefault(unit, set()).add(replica)

    def __bool__(self) -> bool:
        return bool(self._homes)

    def unit_of(self, replica: int) -> int:
        """Return a storage unit on the replica's host; successive calls take them in turn."""
        units = tuple(self._homes[replica])
        self._num_given[units] += 1
        return units[self._num_given[units] % len(units)]

    def near(self, row_id: int) -> set[int]:
        """Return the replicas on the host of the row's storage unit."""
        return self._near.get(row_id % self._num_units, set())


FEWEST_ROLLOUTS = 16  # that a pool must have written before its speed counts
NUM_LATEST = 512  # rollouts that its speed is the mean of, about


@dataclass(slots=True)
class PoolSpeed:
    """Counts the tokens that the replicas of one pool wrote and the slot seconds that this took;
    old rollouts count less."""

    num_slots: int
    num_rollouts: int = 0
    num_tokens: float = 0.0
    slots_s: float = 0.0

    @property
    def slot_rate(self) -> float | None:
        """The tokens per second and used slot; None until it is known."""
        is_known = self.num_rollouts >= FEWEST_ROLLOUTS and self.slots_s > 0 and self.num_tokens > 0
        return self.num_tokens / self.slots_s if is_known else None


class Speeds:
    """Measures how fast the replicas of each of these `pools` are; with fewer than two pools it
    measures nothing."""

    def __init__(self, pools: Sequence[Pool] = ()) -> None:
        self.is_on = len(pools) > 1
        self._kinds = pools
        self._pools = [PoolSpeed(pool.generator.max_num_seqs) for pool in pools]
        self._since_s: dict[int, float] = {}  # by replica, when its rollouts last changed
        self._cut: dict[int, int] = {}  # by row, tokens of a rollout that goes on anywhere

    def of(self, index: int) -> float:
        """Return the tokens per second of a full replica, or 1 where all are alike. Until a pool
        has written enough, its slots count as fast as the others'."""
        if not self.is_on:
            return 1.0
        pool = self._pool(index)
        known = [rate for each in self._pools if (rate := each.slot_rate) is not None]
        mean = sum(known) / len(known) if known else 1.0
        return pool.num_slots * (pool.slot_rate or mean)

    def note(self, index: int, num_running: int) -> None:
        """Count the time since the last note, in which the replica held `num_running` rollouts.
        Call it just before that number changes."""
        if self.is_on:
            now_s, pool = asyncio.get_running_loop().time(), self._pool(index)
            seconds = now_s - self._since_s.get(index, now_s)
            pool.slots_s += min(num_running, pool.num_slots) * seconds
            self._since_s[index] = now_s

    def observe(self, index: int, request: Request, row: RolloutInfo) -> None:
        """Count the tokens of a rollout that has stopped on the replica."""
        if not self.is_on:
            return
        before = self._cut.pop(row.row_id, 0) if request.resume else 0
        if row.finish_reason is FinishReason.SEGMENT:
            self._cut[row.row_id] = row.num_generated
        pool, kept = self._pool(index), 1 - 1 / NUM_LATEST
        pool.num_rollouts += 1
        num_generated = sum(each.num_generated for each in row.sequences)
        pool.num_tokens = kept * pool.num_tokens + num_generated - before
        pool.slots_s *= kept

    def _pool(self, index: int) -> PoolSpeed:
        return self._pools[number_of(self._kinds, index)]


Steps = Callable[[], Iterable[tuple[int, float]]]
"""New decode steps: (rollouts in one, seconds)."""


class Skew:
    """Expects the length of each rollout, and splits the replicas between long and other groups.

    With `ranker` None it uses the config's. `read_steps` may take long, so it is called in a
    thread; by default it finds no steps. `is_streamed` says that parts of a step are trained before
    the step is whole.
    """

    def __init__(
        self,
        config: DispatchConfig,
        limits: Limits,
        read_steps: Steps = list,
        ranker: Ranker | None = None,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.split = TailSplit()
        self._is_streamed = is_streamed
        # Expected tokens of those that start before the others.
        self._first_from = math.inf if is_streamed else 0
        self._config, self._limits, self._read_steps = config, limits, read_steps
        self._ranker = make_ranker(config) if ranker is None else ranker
        self._latency = Latency()
        self._refitting: asyncio.Future[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether lengths are expected at all."""
        return type(self._ranker) is not Ranker

    def expect(self, requests: list[Request]) -> list[Request]:
        """Return the same requests with the expected length and the precedence of each. Rollouts
        that come alone are compared with those that came together last."""
        if not self.is_on:
            return requests
        tokens = self._ranker.expect(requests)
        num_first = round(self._config.tail_share * len(tokens))
        if self._is_streamed and num_first and len(set(tokens)) > 1:
            self._first_from = sorted(tokens, reverse=True)[num_first - 1]
        return [
            replace(each, expected_tokens=n, precedence=n if n >= self._first_from else 0)
            for each, n in zip(requests, tokens, strict=True)
        ]

    def observe(self, request: Request, row: RolloutInfo) -> None:
        """Learn from a rollout that has stopped, if it ended by itself or at its limit."""
        is_whole = row.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole and request.purpose is Purpose.TRAIN:
            self._ranker.observe(request, sum(each.num_generated for each in row.sequences))

    def plan(
        self, groups: Sequence[Sequence[Request]], num_replicas: int, *, may_split: bool = True
    ) -> None:
        """Split `num_replicas` replicas for these groups, which form one step, and refit in a
        thread beside the loop.

        Raises what the last refit raised.
        """
        if not self.is_on:
            return
        lengths = [max(request.expected_tokens for request in group) for group in groups]
        self.split = TailSplit()
        if may_split and self._latency.is_known and min(lengths) > 0 and num_replicas > 1:
            self.split = find_split(
                lengths,
                num_replicas,
                max(map(len, groups)),
                self._latency,
                self._limits,
                tail_share=self._config.tail_share,
            )
        if self._refitting is None or self._refitting.done():
            if self._refitting is not None:
                self._refitting.result()
            self._refitting = asyncio.ensure_future(
                asyncio.to_thread(self._refit, num_replicas > 1)
            )

    def _refit(self, has_siblings: bool) -> None:
        self._ranker.refit()
        if has_siblings:  # else there is nothing to split
            self._latency.fit(self._read_steps())


IDLE_SHARE = 0.1  # of a step's rollouts, which idle replicas hold at most when it begins
BEHIND_SHARE = 0.25  # by which a replica that has yet to commit counts as more loaded than it is


@dataclass(slots=True)
class Replica:
    """One engine: its handle, the version it serves, and the requests it holds. `received` is the
    number of the next row that it reports.

    `load` is the number of tokens that it will probably write (where no length is expected: that it
    may write). It counts tokens because long rollouts delay a replica more than many rollouts do.
    """

    generator: GeneratorReplica
    version: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    load: int = 0
    received: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether it holds a request that need not wait for a version."""
        return any(each.min_version <= self.version for each in self.running.values())


def tokens_of(request: Request) -> int:
    """Return the tokens that a request adds to a replica's load: those expected, or else its
    limit."""
    return request.expected_tokens or request.sampling.max_tokens


Queues = dict[tuple[int, bool, frozenset[int] | None], list[tuple[bool, float, int]]]
"""(oldest version, whether it is an evaluation, replicas to choose from; None: all) -> a heap of
these by how well they suit."""


class Balance:
    """Holds the live `replicas` by index, and chooses among them.

    Example: with replicas {0: 10 requests, 1: 4 requests} of equal length, the next group of 8 goes
    to replica 1. A replica that is one version below the group's `min_version` is about to commit:
    its load counts `BEHIND_SHARE` more, and it holds the group until it commits. A replica that is
    further behind, or keeps its version, is chosen only if all are. Without `neighbours` everything
    is on one host; without `skew` no lengths are expected. Where replicas are not equally fast
    (`speeds`), the choice is the one that would have written the next group first.
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
        """Give each run of requests with equal prompts to the replica that suits it best, which
        then holds it.

        Returns the requests by replica, and those that no live replica can take: all if there is no
        replica, an evaluation's if none keeps its version.
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
        """The share of replicas that hold a rollout which they may write."""
        replicas = self.replicas.values()
        return sum(each.is_busy for each in replicas) / len(replicas) if replicas else 1.0

    @property
    def _open(self) -> Set[int]:
        """The replicas that get requests: all but those that are being drained, unless all are."""
        replicas = self.replicas.keys()
        return (replicas - self.draining or replicas) if self.draining else replicas

    def hold(self, index: int, request: Request) -> None:
        """Note that this replica holds the request."""
        replica = self.replicas[index]
        self._speeds.note(index, len(replica.running))
        replica.running[request.row_id] = request
        replica.load += tokens_of(request)

    def release(self, index: int, row: RolloutInfo) -> bool:
        """Let go of a rollout that has stopped; return whether this replica held it."""
        if (replica := self.replicas.get(index)) is None:
            return False
        self._speeds.note(index, len(replica.running))
        if (request := replica.running.pop(row.row_id, None)) is None:
            return False
        replica.load -= tokens_of(request)
        self._skew.observe(request, row)
        self._speeds.observe(index, request, row)
        return True

    def _order(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Yield the groups, the longest of each step first; before those of a whole step, the
        replicas are split anew."""
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
        """Return the storage unit for each of the groups that are submitted next: one on the host
        of the replica that will have least to do then, or None where it does not matter."""
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
        """Return a storage unit on this replica's host, or None where it does not matter."""
        return self._neighbours.unit_of(index) if self._neighbours else None

    def _choose(self, queues: Queues, group: list[Request]) -> int:
        """Return the replica that suits the group best. One on the host of the group's storage unit
        takes precedence if it suits as well, or has at most this group more to write."""
        is_evaluation = group[0].purpose is Purpose.EVALUATE
        kind = max(request.min_version for request in group), is_evaluation
        best = self._find_best(queues, kind, None)
        assert best is not None  # `spread` asks only if some replica may take the group
        load = sum(map(tokens_of, group))
        some = None
        if not is_evaluation:
            self._group_load = load
            is_long = max(r.expected_tokens for r in group) >= self._skew.split.long_from
            some = self._for_long if is_long else self._for_rest
        if some and best[2] not in some:
            inside = self._find_best(queues, kind, some)
            if inside and inside[0] <= best[0]:
                best = inside
        near = self._neighbours.near(group[0].row_id)
        if near and best[2] not in near:
            there = self._find_best(queues, kind, frozenset(near & some if some else near))
            if there and there[0] <= best[0]:
                is_close = there[1] <= best[1] + load / self._speeds.of(there[2])
                return there[2] if is_close else best[2]
        return best[2]

    def _find_best(
        self, queues: Queues, kind: tuple[int, bool], some: frozenset[int] | None
    ) -> tuple[bool, float, int] | None:
        """Return the rank of the best of all replicas, or of those in `some`; None if there are
        none. `queues` is empty when a `submit` begins. Loads only grow during one, so an entry of a
        heap may be too low but never too high."""
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
