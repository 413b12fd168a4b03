"""How many replicas there are, and starting those that are missing.

Owns: when a replica is started, started again, stopped or given up. Does not own: its processes
(`start` makes them), its requests (`dispatch.py`) or its weights (`weights/sync/`). Invariant: a
replica that is started while the run goes on gets requests only after its first commit, so after
the weights in its memory were compared with what the trainer sent; whatever it says of itself does
not matter.

    missing -> starting -> joining (gets the newest version) -> serving -> lost, drained or stopped

A replica whose host is lost is given up, as long as there are others: nothing can be started there.
"""

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from llamarl.cluster import ExecutorGroup
from llamarl.errors import GroupLost, NoGenerator
from llamarl.loop.dispatch import Dispatch
from llamarl.weights.sync.replica_sync import PeerRelay

log = logging.getLogger(__name__)

WINDOW_S = 3600.0  # over which restarts are counted
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a restart; doubled after each that fails
STOP_LIMIT_S = 30.0  # for the processes of a lost replica to end, before another takes their place


class Joins(Protocol):
    """What brings versions to replicas (`Publisher`)."""

    async def connect_replica(self, replica: int, generator: PeerRelay) -> None:
        """Bring the newest version to this replica too; raises whatever it fails with."""

    async def drop(self, replica: int) -> None:
        """Bring no more versions to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica does. `version` is -1 before its first commit; `num_running` counts the
    rollouts that it holds, `load` the tokens that they may still take; `num_restarts` those within
    an hour."""

    replica: int
    state: str
    version: int
    num_running: int
    load: int
    num_restarts: int


class ReplicaSet:
    """The replicas of a run. `groups`, which is kept up to date, holds those that were started;
    `start` starts the one of an index. A replica may be started again `max_restarts` times within
    an hour; 0: never, and the others go on without it."""

    def __init__(
        self,
        groups: dict[int, ExecutorGroup],
        start: Callable[[int], Awaitable[ExecutorGroup]],
        publisher: Joins,
        dispatch: Dispatch,
        *,
        max_restarts: int,
    ) -> None:
        self._groups, self._start = groups, start
        self._publisher, self._dispatch = publisher, dispatch
        self._max_restarts = max_restarts
        self._restarts: dict[int, deque[float]] = defaultdict(deque)  # when, by replica
        self._num_failed: dict[int, int] = defaultdict(int)  # in a row
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._lost_early: dict[int, Exception] = {}  # while it joined
        self._given_up: set[int] = set()  # with their hosts
        self._failed: asyncio.Future[None] | None = None
        if max_restarts:
            dispatch.on_lost = self._lost

    async def watch(self) -> None:
        """Wait until a replica was lost too often, or could not be removed, and raise that."""
        await self._failure()

    def status(self) -> list[ReplicaStatus]:
        """Of all replicas, by index."""
        return [self._status(index) for index in sorted({*self._known(), *self._starting})]

    def wanted(self) -> list[int]:
        """The indices of all replicas but those that are being removed."""
        return sorted({*self._known(), *self._starting} - self._leaving.keys())

    def missing(self, num_replicas: int) -> list[int]:
        """The indices that `scale` starts to have so many: the lowest that are free, but none whose
        host was lost."""
        taken = {*self._known(), *self._starting, *self._leaving, *self._given_up}
        free = (index for index in itertools.count() if index not in taken)
        return list(itertools.islice(free, max(0, num_replicas - len(self.wanted()))))

    async def scale(self, num_replicas: int, *, drains: bool = True) -> None:
        """Start or stop replicas until there are so many: `missing` ones are started, the highest
        ones stopped. Returns once those that are to be stopped have ended; others may still start.

        With `drains` a replica writes what it holds first; else that goes on elsewhere.
        """
        for index in self.missing(num_replicas):
            log.info("generator %d is started", index)
            self._begin(index)
        extra = self.wanted()[num_replicas:]
        for index in extra:
            self._leaving[index] = asyncio.create_task(self._remove(index, drains=drains))
        await asyncio.gather(*(self._leaving[index] for index in extra))

    async def close(self) -> None:
        """Start and stop no more; what has started is in `groups`."""
        tasks = [*self._starting.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self) -> set[int]:
        """The replicas that were started, but for lost ones that nothing takes the place of."""
        return {i for i in self._groups if self._max_restarts or self._dispatch.expects(i)}

    def _recent_restarts(self, index: int) -> deque[float]:
        """When the replica was started again within the last hour."""
        restarts, now_s = self._restarts[index], asyncio.get_running_loop().time()
        while restarts and restarts[0] < now_s - WINDOW_S:
            restarts.popleft()
        return restarts

    def _status(self, index: int) -> ReplicaStatus:
        serving = self._dispatch.replicas.get(index)
        if index in self._leaving:
            state = "draining"
        elif serving is not None:
            state = "serving"
        else:
            state = "starting" if index in self._starting else "joining"
        return ReplicaStatus(
            replica=index,
            state=state,
            version=-1 if serving is None else serving.version,
            num_running=0 if serving is None else len(serving.running),
            load=0 if serving is None else serving.load,
            num_restarts=len(self._recent_restarts(index)),
        )

    def _lost(self, index: int, why: Exception) -> None:
        """A replica is lost: its processes are stopped, and others take their place."""
        if index in self._leaving:
            return
        if index in self._starting:
            self._lost_early[index] = why
            return
        if isinstance(why, GroupLost) and not why.has_host:
            return self._give_up(index, why)
        if index in self._given_up:  # the publish finds it too
            return
        restarts = self._recent_restarts(index)
        if len(restarts) == self._max_restarts:
            return self._fail(
                NoGenerator(
                    f"generator {index} must not be lost more often than generator.max_restarts="
                    f"{self._max_restarts} times within an hour"
                ),
                why,
            )
        restarts.append(asyncio.get_running_loop().time())
        self._begin(index, LONGEST_PAUSE_S / FIRST_PAUSE_S)

    def _give_up(self, index: int, why: GroupLost) -> None:
        """The replica's host is lost, so nothing can be started there."""
        self._given_up.add(index)
        if self.wanted() == [index]:
            return self._fail(why, why)
        reason = why.reason.splitlines()[0]
        log.warning("generator %d is not started again, the others go on: %s", index, reason)
        self._leaving[index] = asyncio.create_task(self._remove(index, drains=False))

    def _begin(self, index: int, most_pause: float = 0.0) -> None:
        """Start a replica, after a pause that grows with each time it failed in a row."""
        pause_s = FIRST_PAUSE_S * min(2.0 ** self._num_failed[index], most_pause)
        self._num_failed[index] += 1
        self._starting[index] = asyncio.create_task(self._replace(index, pause_s))

    async def _replace(self, index: int, pause_s: float) -> None:
        try:
            if (lost := self._groups.get(index)) is not None:
                await asyncio.wait({asyncio.ensure_future(lost.stop())}, timeout=STOP_LIMIT_S)
            await asyncio.sleep(pause_s)
            group = self._groups[index] = await self._start(index)
            self._lost_early.pop(index, None)  # that of the processes before
            self._dispatch.expect(index, group, self._served)
            await self._publisher.connect_replica(index, group.call_all)
        except Exception as why:  # noqa: BLE001 - counts as one more loss, whatever it is
            log.warning("generator %d did not start: %s", index, why)
            self._lost_early[index] = why
        del self._starting[index]
        if (lost_by := self._lost_early.pop(index, None)) is not None:
            if self._max_restarts:
                return self._lost(index, lost_by)
            if (failed := self._groups.pop(index, None)) is not None:
                await failed.stop()

    def _served(self, index: int) -> None:
        """The replica has its first version."""
        log.info("generator %d takes requests", index)
        self._num_failed[index] = 0

    async def _remove(self, index: int, *, drains: bool) -> None:
        try:
            if (starting := self._starting.get(index)) is not None:
                await asyncio.wait({starting})  # a start that is cut short leaves processes
            if drains:
                await self._dispatch.drain(index)
            await self._publisher.drop(index)
            self._dispatch.remove(index)
            if (group := self._groups.pop(index, None)) is not None:
                await group.stop()
            log.info("generator %d is stopped", index)
        except Exception as error:  # noqa: BLE001 - raised again in `watch`
            self._fail(error, error)
        finally:
            del self._leaving[index]

    def _failure(self) -> asyncio.Future[None]:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        return self._failed

    def _fail(self, error: Exception, cause: Exception) -> None:
        if error is not cause:
            error.__cause__ = cause
        if not self._failure().done():
            self._failure().set_exception(error)
