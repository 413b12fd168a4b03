"""Which replica gets which request.

Owns: the live replicas, what runs on each, and what becomes of a lost one's work. Does not own: the
bound (`gate.py`) or the weights. Invariant: every request submitted comes out of `collect`
exactly once, or `collect` raises; a lost replica's requests start again elsewhere, once its
processes have ended, or after STOP_S if they do not end. What the lost replica still sends to
storage is refused then, because a request that starts again has a higher `Request.attempt`.

The dispatcher asks each replica which rollouts stopped; where there are hundreds, collectors do.
It is itself a Generator, so the controller sees one however many replicas there are.
"""

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from llamarl.errors import GroupLost, NoGenerator
from llamarl.loop.placement import Neighbours
from llamarl.protocols import Collector, Generator, Storage
from llamarl.types import FinishReason, Purpose, Request, RolloutInfo

log = logging.getLogger(__name__)

BEHIND_SHARE = 0.25  # by which a replica that has yet to commit counts as more loaded than it is
STOP_S = 10.0  # longest wait for the processes of a lost replica to end


@dataclass(slots=True)
class Replica:
    """One engine: its handle, the version it serves, and the requests it holds.

    `load` is the number of tokens it may still have to write: a replica is late with long rollouts
    more than with many.
    """

    generator: Generator
    version: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    load: int = 0

    def hold(self, request: Request) -> None:
        self.running[request.row_id] = request
        self.load += request.sampling.max_tokens

    def release(self, row_id: int) -> bool:
        """True if the request was held here."""
        request = self.running.pop(row_id, None)
        self.load -= request.sampling.max_tokens if request else 0
        return request is not None


Queues = dict[tuple[int, bool, int], list[tuple[bool, float, int]]]
"""(oldest version, whether it is an evaluation, id of the set of near ones) -> a heap of the
replicas by how well they suit."""


class Dispatch:
    """Spreads requests over replicas; rollouts of one prompt stay together and share its prefill.

    Example: with replicas {0: 10 requests, 1: 4 requests} of equal length, the next group of 8 goes
    to replica 1. A replica that is one version below the group's `min_version` is about to commit:
    it counts as more loaded than it is, by `BEHIND_SHARE`, and holds the group until it does. One
    that is further behind, or keeps its version, is chosen only if all are.
    """

    def __init__(
        self,
        generators: dict[int, Generator],
        storage: Storage,
        collectors: Sequence[Collector] = (),
        watches: Mapping[int, Callable[[], Awaitable[None]]] | None = None,
        stops: Mapping[int, Callable[[], Awaitable[None]]] | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """If there are `collectors`, they collect from all `generators`, and `watches` raise once a
        replica is lost. `stops` end a replica's processes. Without `neighbours` all is on one
        host."""
        self.replicas = {index: Replica(generator) for index, generator in generators.items()}
        self._storage = storage
        self._collectors = collectors
        self._watches = watches or {}
        self._stops = stops or {}
        self._neighbours = neighbours or Neighbours({}, 1)
        self._group_load = 1  # of the last group that was submitted
        self._rows: asyncio.Queue[list[RolloutInfo] | BaseException] = asyncio.Queue()
        self._collecting: dict[int, asyncio.Task[None]] = {}  # by replica
        self._collector_tasks: list[asyncio.Task[None]] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._keepers: set[int] = set()  # replicas that keep their version for an evaluation
        self._unplaced: dict[int, Request] = {}  # of lost replicas, not yet started again
        self._attempts: Counter[int] = Counter()  # by row: replicas that were lost with it
        self._last_loss: Exception | None = None

    async def submit(self, requests: list[Request]) -> None:
        """Queue requests, each run of equal prompts on the replica that suits it best. Those of an
        evaluation go to replicas that keep their version; once those are lost, nowhere: they come
        out of `collect` marked ABORTED."""
        shares: dict[int, list[Request]] = {}
        queues: Queues = {}
        for _, run in groupby(requests, key=lambda r: (r.prompt_ids, r.purpose)):
            group = [self._renewed(request) for request in run]
            min_version = max(request.min_version for request in group)
            is_evaluation = group[0].purpose is Purpose.EVALUATE
            if is_evaluation and not self._keepers & self.replicas.keys():
                self._give_up(group)
                continue
            index = self._choose(queues, group, min_version)
            for request in group:
                self.replicas[index].hold(request)
            shares.setdefault(index, []).extend(group)
        calls = (self._send(self.replicas[i], i, share) for i, share in shares.items())
        await asyncio.gather(*calls)

    def plan_units(self, num_groups: int) -> list[int | None]:
        """The storage unit for each of the groups that are submitted next: one on the host of the
        replica that has least to do then. None where it does not matter."""
        if not self._neighbours or not self.replicas:
            return [None] * num_groups
        loads = [(replica.load, index) for index, replica in self.replicas.items()]
        heapq.heapify(loads)
        units: list[int | None] = []
        for _ in range(num_groups):
            load, index = loads[0]
            units.append(self._neighbours.unit_of(index))
            heapq.heapreplace(loads, (load + self._group_load, index))
        return units

    def unit_near(self, index: int) -> int | None:
        """A storage unit on this replica's host. None where it does not matter."""
        return self._neighbours.unit_of(index) if self._neighbours else None

    async def submit_to(self, index: int, requests: list[Request]) -> None:
        """Queue requests on this very replica; nothing happens if it is lost."""
        if index in self.replicas:
            replica = self.replicas[index]
            for request in requests:
                replica.hold(request)
            await self._send(replica, index, requests)

    def _renewed(self, request: Request) -> Request:
        """The request under its present attempt."""
        attempt = self._attempts[request.row_id]
        return request if request.attempt == attempt else replace(request, attempt=attempt)

    async def _send(self, replica: Replica, index: int, requests: list[Request]) -> None:
        """One call for all that goes to a replica. If it is lost first, they go elsewhere."""
        if not self._collector_tasks:
            self._collector_tasks = [
                asyncio.create_task(self._read_collector(each)) for each in self._collectors
            ]
        if self.replicas.get(index) is not replica:
            return  # lost since they were given to it, so they start elsewhere
        if index not in self._collecting:
            self._collecting[index] = asyncio.create_task(self._follow(index))
        await self._ask(replica, index, replica.generator.submit(requests))

    async def _ask(self, replica: Replica, index: int, call: Awaitable[None]) -> None:
        """Await a call to a replica, which may be lost before it, during it or because of it."""
        try:
            await call
        except GroupLost as error:
            self.lost(index, error)
        except Exception:
            if self.replicas.get(index) is not replica:  # whatever a replica that is stopped raises
                return
            raise

    async def collect(self) -> list[RolloutInfo]:
        """Rows that stopped on any replica. NoGenerator when the last replica is lost."""
        rows: list[RolloutInfo] = []
        while not (rows and self._rows.empty()):
            more = await self._rows.get()
            if isinstance(more, BaseException):
                raise more
            rows += more
        return rows

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts wherever they run."""
        wanted = set(row_ids)
        held = {i: sorted(wanted & each.running.keys()) for i, each in self.replicas.items()}
        calls = (
            self._ask(self.replicas[i], i, self.replicas[i].generator.abort_requests(those))
            for i, those in held.items()
            if those
        )
        await asyncio.gather(*calls)
        self._give_up([self._unplaced.pop(i) for i in sorted(wanted & self._unplaced.keys())])

    def committed(self, replica: int, version: int) -> None:
        """`replica` has committed `version`."""
        if replica in self.replicas:
            self.replicas[replica].version = version

    def hold(self, replicas: set[int]) -> None:
        """These replicas, and no others, keep their version."""
        self._keepers = replicas

    def lost(self, index: int, why: Exception) -> None:
        """`index` is given up, by a publish or because it died: once its processes have ended its
        requests start again elsewhere. Without effect if it is lost already; where `why` names what
        every replica needs, such as a storage unit, `collect` raises it."""
        if isinstance(why, GroupLost) and not why.group.startswith("generator"):
            self._rows.put_nowait(why)
            return
        replica = self.replicas.pop(index, None)
        if replica is None:
            return
        self._last_loss = why
        task = self._collecting.pop(index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        now = "start again elsewhere" if self.replicas else "are lost too: it was the last one"
        log.warning("generator %d: its %d rollouts %s: %s", index, len(replica.running), now, why)
        self._unplaced |= replica.running
        self._restarts.add(asyncio.create_task(self._restart(index, list(replica.running))))

    async def close(self) -> None:
        """Stop collecting."""
        tasks = [*self._collecting.values(), *self._collector_tasks, *self._restarts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choose(self, queues: Queues, group: list[Request], min_version: int) -> int:
        """The replica that suits best; one on the host of the group's storage unit if it suits as
        well, or has at most this group more to write."""
        if not self.replicas:
            raise NoGenerator("every generator replica is lost") from self._last_loss
        is_evaluation = group[0].purpose is Purpose.EVALUATE
        kind = min_version, is_evaluation
        best = self._find_best(queues, kind, None)
        assert best is not None  # an evaluation without keepers was given up
        load = sum(request.sampling.max_tokens for request in group)
        if not is_evaluation:
            self._group_load = load
        near = self._neighbours.near(group[0].row_id)
        if near and best[2] not in near:
            there = self._find_best(queues, kind, near)
            if there and there[0] <= best[0] and there[1] <= best[1] + load:
                return there[2]
        return best[2]

    def _find_best(
        self, queues: Queues, kind: tuple[int, bool], near: set[int] | None
    ) -> tuple[bool, float, int] | None:
        """The rank of the best of all replicas, or of those that are `near`; None if there are
        none. `queues` is empty when a `submit` begins. Loads only grow during one, so an entry of a
        heap may be too low but never too high."""
        min_version, is_evaluation = kind
        queue = queues.get((*kind, id(near)))
        if queue is None:
            candidates = self._keepers if is_evaluation else self.replicas.keys()
            some = candidates & (
                self.replicas.keys() if near is None else near & self.replicas.keys()
            )
            queue = queues[*kind, id(near)] = [self._rank(index, min_version) for index in some]
            heapq.heapify(queue)
        while queue and queue[0] != (found := self._rank(queue[0][2], min_version)):
            heapq.heapreplace(queue, found)
        return queue[0] if queue else None

    def _rank(self, index: int, min_version: int) -> tuple[bool, float, int]:
        replica = self.replicas[index]
        num_behind = max(0, min_version - replica.version)
        is_far = num_behind > (index not in self._keepers)
        return is_far, replica.load * (1 + BEHIND_SHARE * num_behind), index

    async def _follow(self, index: int) -> None:
        """Collect from a replica until it is lost; if a collector does, only wait for its loss."""
        replica = self.replicas[index]
        try:
            if self._collectors:
                await self._watches[index]()
            while not self._collectors:
                self._release(index, await replica.generator.collect())
        except GroupLost as error:
            self.lost(index, error)
        except Exception as error:  # noqa: BLE001 - raised again in `collect`, where it ends the run
            self._rows.put_nowait(error)

    async def _read_collector(self, collector: Collector) -> None:
        try:
            while True:
                for index, report in await collector.collect():
                    if isinstance(report, GroupLost):
                        self.lost(index, report)
                    elif not isinstance(report, Exception):
                        self._release(index, report)
                    elif index in self.replicas:  # else it was being stopped
                        raise report
        except Exception as error:  # noqa: BLE001 - raised again in `collect`, where it ends the run
            self._rows.put_nowait(error)

    def _release(self, index: int, rows: list[RolloutInfo]) -> None:
        """Pass on rows that stopped on a replica. Those that a collector reports late, after the
        replica was given up, are left out: they have started again."""
        replica = self.replicas.get(index)
        known = [row for row in rows if replica and replica.release(row.row_id)]
        if known:
            self._rows.put_nowait(known)

    async def _restart(self, index: int, row_ids: list[int]) -> None:
        try:
            if index in self._stops:
                stopping = asyncio.ensure_future(self._stops[index]())
                await asyncio.wait({stopping}, timeout=STOP_S)
                if not stopping.done():
                    log.warning("generator %d does not end: storage takes nothing from it", index)
            lost = [row_id for row_id in row_ids if row_id in self._unplaced]
            # What the lost replica stored but never announced must not meet the new arrays.
            await self._storage.retire(lost, {"outcome": "lost", "replica": index})
            self._attempts.update(lost)
            requests = [self._unplaced.pop(i) for i in lost if i in self._unplaced]
            await self.submit([replace(request, resume=False) for request in requests])
        except Exception as failure:  # noqa: BLE001 - raised again in `collect`
            self._rows.put_nowait(failure)

    def _give_up(self, requests: list[Request]) -> None:
        """Let `collect` return these as ABORTED: they will not be written."""
        rows = [
            RolloutInfo(
                row_id=request.row_id,
                num_prompt_tokens=len(request.prompt_ids),
                num_tokens=0,
                spans=(),
                finish_reason=FinishReason.ABORTED,
            )
            for request in requests
        ]
        if rows:
            self._rows.put_nowait(rows)
