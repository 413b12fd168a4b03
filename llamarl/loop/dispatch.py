"""Requests to the replicas, and what comes back.

Owns: the calls to replicas, and what becomes of a lost one's work. Does not own: which replica gets
which request (`balance.py`), the bound (`gate.py`) or the weights. Invariant: every request
submitted comes out of `collect` exactly once, or `collect` raises; a lost replica's requests start
again elsewhere, once its processes have ended, or after STOP_S if they do not end. What the lost
replica still sends to storage is refused then, because a request that starts again has a higher
`Request.attempt`.

The dispatcher asks each replica which rollouts stopped; where there are hundreds, collectors do.
It is itself a Generator, so the controller sees one however many replicas there are.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from llamarl.errors import GroupLost, NoGenerator
from llamarl.loop.balance import Balance, Replica
from llamarl.loop.placement import Neighbours
from llamarl.protocols import Collector, Generator, Storage
from llamarl.types import FinishReason, Purpose, Request, RolloutInfo

log = logging.getLogger(__name__)

STOP_S = 10.0  # longest wait for the processes of a lost replica to end


class Dispatch:
    """One Generator over all replicas, of which some may be lost."""

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
        self.balance = Balance(neighbours)
        self.replicas = self.balance.replicas
        self.replicas |= {index: Replica(generator) for index, generator in generators.items()}
        self._storage = storage
        self._collectors = collectors
        self._watches = watches or {}
        self._stops = stops or {}
        self._rows: asyncio.Queue[list[RolloutInfo] | BaseException] = asyncio.Queue()
        self._collecting: dict[int, asyncio.Task[None]] = {}  # by replica
        self._collector_tasks: list[asyncio.Task[None]] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self._unplaced: dict[int, Request] = {}  # of lost replicas, not yet started again
        self._attempts: Counter[int] = Counter()  # by row: replicas that were lost with it
        self._last_loss: Exception | None = None

    async def submit(self, requests: list[Request]) -> None:
        """Queue requests, each run of equal prompts on the replica that suits it best. Those of an
        evaluation go to replicas that keep their version; once those are lost, nowhere: they come
        out of `collect` marked ABORTED."""
        shares, left = self.balance.spread([self._renewed(request) for request in requests])
        if left and left[0].purpose is not Purpose.EVALUATE:
            raise NoGenerator("every generator replica is lost") from self._last_loss
        self._give_up(left)
        calls = (self._send(self.replicas[i], i, share) for i, share in shares.items())
        await asyncio.gather(*calls)

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
        self.balance.keepers = replicas

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
