"""Dispatch decides which replica writes a rollout, and when it may begin."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from llamarl.controller.balance import Balance, Replica
from llamarl.controller.gate import ROOM_PAUSE_S
from llamarl.core.errors import ExecutorLost, NoGenerator, RepeatedWarnings, cancel_all
from llamarl.core.faces import Collector, GeneratorReplica, Report, Storage
from llamarl.core.records import FinishReason, Purpose, Request, RolloutInfo

if TYPE_CHECKING:
    from llamarl.cluster.executor import Executor


log = logging.getLogger(__name__)


@dataclass
class Capacity:
    """Tells whether storage has room for more rollouts. `await room()` is False, and the log says
    so, while a storage unit holds all that it may and cannot move rollouts to disk. It asks storage
    at most once in ROOM_PAUSE_S."""

    storage: Storage
    _next_s: float = -math.inf
    _is_full: bool = False
    _warnings: RepeatedWarnings = field(default_factory=lambda: RepeatedWarnings(log))

    async def __call__(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_s:
            self._next_s = now_s + ROOM_PAUSE_S
            usage = await self.storage.usage()
            if usage["is_full"] and not self._is_full:
                self._warnings.warn(
                    "storage is full (%.1f GiB in memory, %.1f GiB on disk): no more than the "
                    "next step's rollouts are asked for until that changes",
                    usage["memory_bytes"] / 2**30,
                    usage["spilled_bytes"] / 2**30,
                )
            self._is_full = usage["is_full"] > 0
        return not self._is_full


DRAIN_POLL_S = 0.1
Work = Callable[..., Awaitable[None]]


class Dispatch:
    """Presents all replicas, some of which may be lost, as one generator."""

    def __init__(
        self,
        processes: Mapping[int, Executor],
        storage: Storage,
        balance: Balance,
        collectors: Sequence[Collector] = (),
    ) -> None:
        """If there are `collectors`, they collect from all replicas: collector i from those whose
        index modulo the number of collectors is i."""
        self.balance = balance
        self.replicas = self.balance.replicas
        self.replicas |= {
            index: Replica(own.one(GeneratorReplica)) for index, own in processes.items()
        }
        self.on_lost: Callable[[int, Exception], None] | None = None
        """Gets each replica that is lost. With it others may come, so requests wait for them if
        there are none."""
        self._processes = dict(processes)
        self._storage = storage
        self._collectors = collectors
        self._rows: asyncio.Queue[list[RolloutInfo] | BaseException] = asyncio.Queue()
        self._collecting: dict[int, asyncio.Task[None]] = {}  # by replica
        self._collector_tasks: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # what replicas that come or go cause
        self._unplaced: dict[int, Request] = {}  # of lost replicas, not yet started again
        self._waiting: dict[int, Request] = {}  # for a replica
        self._joining: dict[int, tuple[Executor, Callable[[int], None]]] = {}
        self._may_hold_more = False
        self._last_loss: Exception | None = None

    async def submit(self, requests: list[Request]) -> None:
        """Queue requests, each run of equal prompts on the replica that suits it best, without
        waiting for the replicas: one that does not answer delays no other.

        Requests of an evaluation go only to replicas that keep their version. Once those are lost,
        the requests come out of `collect` marked ABORTED, as do those whose `Request.replica` is
        lost. NoGenerator if no replica is left and none may come.
        """
        free = [request for request in requests if request.replica is None]
        shares, left = self.balance.spread(free)
        for request in requests:
            if request.replica is not None and request.replica not in self.replicas:
                self._give_up([request])
            elif request.replica is not None:
                self.balance.hold(request.replica, request)
                shares.setdefault(request.replica, []).append(request)
        is_late = [each.purpose is Purpose.EVALUATE and not self._may_hold_more for each in left]
        self._give_up([*compress(left, is_late)])
        waiting = {each.row_id: each for each, late in zip(left, is_late, strict=True) if not late}
        if waiting and self.on_lost is None:
            raise NoGenerator("every generator replica is lost") from self._last_loss
        self._waiting |= waiting
        for index, share in shares.items():
            self._start(self._send, self.replicas[index], index, share)

    async def _send(self, replica: Replica, index: int, requests: list[Request]) -> None:
        """Submit all requests that go to a replica in one call. If the replica is lost first, they
        go elsewhere."""
        if not self._collector_tasks:
            reading = (self._run(self._read_collector, each) for each in self._collectors)
            self._collector_tasks = [*map(asyncio.create_task, reading)]
        if self.replicas.get(index) is not replica:
            return  # lost since they were given to it, so they start elsewhere
        if index not in self._collecting:
            self._collecting[index] = asyncio.create_task(self._run(self._follow, index))
        await self._ask(replica, index, replica.generator.submit(requests))

    async def _ask(self, replica: Replica, index: int, call: Awaitable[None]) -> None:
        """Await a call to a replica, which may be lost before it, during it or because of it."""
        try:
            await call
        except ExecutorLost as error:
            self.lost(index, error)
        except Exception:
            if self.replicas.get(index) is not replica:  # whatever a replica that is stopped raises
                return
            raise

    async def collect(self) -> list[RolloutInfo]:
        """Return the rows that stopped on any replica. NoGenerator when the last replica is
        lost."""
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
        for idle in (self._unplaced, self._waiting):
            self._give_up([idle.pop(row_id) for row_id in sorted(wanted & idle.keys())])

    def committed(self, replica: int, version: int) -> None:
        """Note that `replica` has committed `version`; a replica that was expected gets requests
        from now on."""
        if replica in self.replicas:
            self.replicas[replica].version = version
        elif replica in self._joining:
            self._processes[replica], serves = self._joining.pop(replica)
            self.replicas[replica] = Replica(
                self._processes[replica].one(GeneratorReplica), version
            )
            serves(replica)
            self._start(self._join, replica)

    def expect(self, index: int, own: Executor, serves: Callable[[int], None]) -> None:
        """Expect a replica: once it has committed its first version it gets requests, and `serves`
        is called."""
        self._joining[index] = own, serves

    def expects(self, index: int) -> bool:
        """Return whether this replica gets requests, or will once it has committed its first
        version."""
        return index in self.replicas or index in self._joining

    async def drain(self, index: int) -> None:
        """Give no more requests to this replica; return when it has stopped those that it has."""
        self.balance.draining.add(index)
        while index in self.replicas and self.replicas[index].running:
            await asyncio.sleep(DRAIN_POLL_S)

    def remove(self, index: int) -> None:
        """Forget this replica; the rollouts that it holds start again elsewhere."""
        self._joining.pop(index, None)
        self._let_go(index)
        self.balance.draining.discard(index)

    def hold(self, replicas: set[int], may_be_more: bool = False) -> None:
        """Let these replicas, and no others, keep their version; `may_be_more` says that others may
        do so later."""
        self.balance.keepers, self._may_hold_more = replicas, may_be_more
        if self._waiting and replicas & self.replicas.keys():
            self._start(self._submit_waiting)

    def lost(self, index: int, why: Exception) -> None:
        """Give up replica `index`, which a publish gave up or which died: its requests start again
        elsewhere. If it is lost already, nothing changes. Where `why` names an executor that every
        replica needs, such as a storage unit, `collect` raises it."""
        if isinstance(why, ExecutorLost) and not why.executor.startswith("generator"):
            return self.fail(why)
        if (num_running := self._let_go(index)) is not None:
            self._last_loss = why
            is_last = not self.replicas and self.on_lost is None
            now = "are lost too: it was the last one" if is_last else "start again elsewhere"
            log.warning("generator %d: its %d rollouts %s: %s", index, num_running, now, why)
        if self.on_lost is not None:
            self.on_lost(index, why)

    def fail(self, error: Exception) -> None:
        """Let `collect` raise this error."""
        self._rows.put_nowait(error)

    async def close(self) -> None:
        """Stop collecting."""
        await asyncio.sleep(0)  # for what has not begun, such as the end of lost processes
        await cancel_all([*self._collecting.values(), *self._collector_tasks, *self._tasks])

    async def _follow(self, index: int) -> None:
        """Collect from a replica until it is lost; if a collector does, only wait for its loss."""
        replica = self.replicas[index]
        try:
            if self._collectors:
                await self._processes[index].watch()
            while not self._collectors:
                self._release(index, await replica.generator.collect(replica.received))
        except ExecutorLost as error:
            self.lost(index, error)

    async def _read_collector(self, collector: Collector) -> None:
        received = 0
        while True:
            received, reports = await collector.collect(received)
            for index, report in reports:
                if isinstance(report, ExecutorLost) and report.executor.startswith("generator"):
                    continue  # `_follow` finds it too, and belongs to the processes of now
                if not isinstance(report, Exception):
                    self._release(index, report)
                elif isinstance(report, ExecutorLost) or index in self.replicas:
                    raise report  # else the replica was being stopped

    def _release(self, index: int, report: Report) -> None:
        """Pass on rows that stopped on a replica, except those that it has reported before. Rows
        that a collector reports after the replica was given up are left out too: they have started
        again."""
        first, rows = report
        if (replica := self.replicas.get(index)) is None:
            return
        rows = rows[max(0, replica.received - first) :]
        replica.received = max(replica.received, first + len(rows))
        known = [row for row in rows if self.balance.release(index, row)]
        if known:
            self._rows.put_nowait(known)

    def _let_go(self, index: int) -> int | None:
        """Give this replica nothing more, and give the rollouts that it holds to others. Returns
        how many they are; None if the replica is gone already."""
        replica = self.replicas.pop(index, None)
        if replica is None:
            return None
        task = self._collecting.pop(index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._unplaced |= replica.running
        processes = self._processes.pop(index)
        self._start(processes.stop)
        self._start(self._restart, index, processes.writer, list(replica.running))
        return len(replica.running)

    async def _join(self, index: int) -> None:
        """Submit the requests that waited for a replica, since one has come."""
        if self._collectors:
            collector = self._collectors[index % len(self._collectors)]
            await collector.follow(index, self._processes[index].one(GeneratorReplica))
        await self._submit_waiting()

    async def _submit_waiting(self) -> None:
        requests, self._waiting = list(self._waiting.values()), {}
        await self.submit(requests)

    def _start(self, work: Work, *arguments: Any) -> None:
        """Start background work as a task."""
        task = asyncio.create_task(self._run(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Work, *arguments: Any) -> None:
        """Await the work; let `collect` raise its error, which ends the run."""
        try:
            await work(*arguments)
        except Exception as failure:  # noqa: BLE001 - raised again in `collect`
            self.fail(failure)

    async def _restart(self, index: int, writer: str, row_ids: list[int]) -> None:
        """Start the rollouts of a lost replica again, except those that are in storage."""
        await self._storage.fence(writer)
        unplaced = ((row_id, self._unplaced.get(row_id)) for row_id in row_ids)
        # What a replica knows of an episode, it alone knows.
        whole = [row_id for row_id, request in unplaced if request and not request.has_turns]
        rows = await self._storage.find(whole)
        found = [row for row in rows if self._unplaced.pop(row.row_id, None)]
        if found:  # whether it had reported them or not; those that were cut go on from there
            log.info("generator %d had stored %d rollouts", index, len(found))
            self._rows.put_nowait([replace(row, replica=index) for row in found])
        lost = [row_id for row_id in row_ids if row_id in self._unplaced]
        # Arrays that a replica which goes on has stored must not meet the new ones.
        await self._storage.retire(lost, {"outcome": "lost", "replica": index})
        requests = [self._unplaced.pop(i) for i in lost if i in self._unplaced]
        # An episode begins again with its next attempt.
        again = [replace(r, resume=False, attempt=r.attempt + r.has_turns) for r in requests]
        await self.submit(again)

    def _give_up(self, requests: list[Request]) -> None:
        """Let `collect` return these requests as ABORTED: they will not be written."""
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
