"""The supervisor of a run: its executors are watched, restarted, scaled and reported."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from llamarl.cluster import LOSS_GRACE_S, Executor
from llamarl.controller.dispatch import Dispatch
from llamarl.controller.elasticity import Elasticity
from llamarl.controller.starter import Executors, end_others
from llamarl.core.config import Config
from llamarl.core.errors import ExecutorLost, NoGenerator, cancel_all
from llamarl.core.faces import Collector, GeneratorReplica, Processor, Report
from llamarl.core.records import StageItem, StageResult
from llamarl.metrics.console import ReportState
from llamarl.publish.publisher import Publisher
from llamarl.scoring.stages import SCORE, Stage

log = logging.getLogger(__name__)

WINDOW_S = 3600.0  # over which restarts are counted
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a restart; doubled after each that fails


class OnLoss(StrEnum):
    """The ways to go on after the loss of an executor."""

    ALONE = "alone"
    """It is started again, while the run goes on."""
    SESSION = "session"
    """All executors except the generators start again, and go on from the newest checkpoint."""
    GIVEN_UP = "given up"
    """The others go on without it; the loss of the last one ends the run."""
    ENDS = "ends the run"


ON_LOSS = {
    "generator replica": (OnLoss.ALONE, OnLoss.GIVEN_UP),
    # Its device is the trainer's in some phases, and so is its host.
    "colocated generator replica": (OnLoss.SESSION, OnLoss.ENDS),
    "collector": (OnLoss.ALONE, OnLoss.ENDS),
    "scorer": (OnLoss.ALONE, OnLoss.ENDS),
    "frozen model": (OnLoss.ALONE, OnLoss.ENDS),
    "stage of the recipe's own": (OnLoss.ALONE, OnLoss.ENDS),
    "environment": (OnLoss.ALONE, OnLoss.ENDS),
    # These hold rollouts, which would be repeated.
    "stage with consumers outside": (OnLoss.ENDS, OnLoss.ENDS),
    "trainer": (OnLoss.SESSION, OnLoss.ENDS),
    "storage unit": (OnLoss.SESSION, OnLoss.ENDS),
}
"""The reaction to a loss, by role: to that of the executor alone, and to that of its host too,
where nothing can be started."""


def role_of(name: str, config: Config, stage: Stage | None = None) -> str:
    """Return the role of the executor of this name, which may run a `stage` between generate and
    settle."""
    if stage is None:
        kind = name.partition("-")[0]
        if kind == "generator":
            kind = "colocated generator" if config.placement.colocated else kind
            return f"{kind} replica"
        return "storage unit" if kind == "storage" else kind
    if stage.is_external:
        return "stage with consumers outside"
    if stage.is_model:
        return "frozen model"
    return "scorer" if stage.name == SCORE else "stage of the recipe's own"


@dataclass
class Restarts:
    """Counts the restarts of one executor, or of several together: at most `limit` within an hour,
    each after a pause that doubles until one succeeds."""

    limit: int
    _begun_s: deque[float] = field(default_factory=deque)
    _num_failed: int = 0  # in a row

    @property
    def num_recent(self) -> int:
        """The number of restarts within the last hour."""
        now_s = asyncio.get_running_loop().time()
        while self._begun_s and self._begun_s[0] < now_s - WINDOW_S:
            self._begun_s.popleft()
        return len(self._begun_s)

    def take(self) -> float | None:
        """Count one more restart and return the pause before it, in seconds; None if there may be
        no more now."""
        if self.num_recent >= self.limit:
            return None
        self._begun_s.append(asyncio.get_running_loop().time())
        pause_s = FIRST_PAUSE_S * 2.0**self._num_failed
        self._num_failed += 1
        return min(pause_s, LONGEST_PAUSE_S)

    def warn(self) -> None:
        """Log that executors other than generators were lost too often."""
        if self.limit:
            words = "executors were lost more often than cluster.max_restarts=%d times in an hour"
            log.warning(words, self.limit)

    def succeeded(self) -> None:
        """Note that the restarted executor works, so the next pause is short again."""
        self._num_failed = 0


class ExecutorStatus(NamedTuple):
    """The state of an executor, with None for what it does not have. `version` is -1 before a
    replica's first commit; `num_running` counts the rollouts that it holds, `load` the tokens that
    they may still take. `num_restarts` counts a replica's restarts within an hour, and those of any
    other executor in this session."""

    name: str
    state: str
    version: int | None = None
    num_running: int | None = None
    load: int | None = None
    num_restarts: int | None = None


@dataclass
class Member:
    """One executor in a session; a `replica` has its number."""

    name: str
    replica: int | None
    on_loss: OnLoss
    if_host_lost: OnLoss
    restarts: Restarts
    num_losses: int = 0
    starting: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    lost_early: Exception | None = None  # while it was started
    failure: Exception | None = None  # it is lost for good
    serves: asyncio.Event = field(default_factory=asyncio.Event)  # or has failed

    def lost_too_often(self, why: Exception) -> Exception:
        """Return the error that ends the run; for a generator it names the config key to raise."""
        if self.replica is None:
            self.restarts.warn()
            return why
        error = NoGenerator(
            f"generator {self.replica} must not be lost more often than generator.max_restarts="
            f"{self.restarts.limit} times within an hour"
        )
        error.__cause__ = why
        return error


@dataclass(frozen=True)
class FailoverStage(Processor):
    """Runs `stage` on the executor `name`: a call to an executor that is lost is repeated on the
    one that takes its place. This does no harm, since all that a stage reads is in storage, and its
    results are not used before the call has ended. What the lost executor wrote is erased first."""

    name: str
    stage: Stage
    supervisor: Supervisor

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        row_ids = [row_id for rows, _ in items for row_id in rows]
        columns = [column.name for column in self.stage.writes]
        erase = partial(self.supervisor.executors.storage.erase, row_ids, columns)
        return await self.supervisor.ask(
            self.name, lambda each: each.one(Processor).process(items), erase
        )


@dataclass(frozen=True)
class FailoverCollector(Collector):
    """Stands for the collector `name` and those that take its place: a call to one that is lost is
    repeated on the next, which does no harm."""

    name: str
    supervisor: Supervisor

    async def collect(self, received: int) -> tuple[int, list[tuple[int, Report | Exception]]]:
        return await self.supervisor.ask(
            self.name, lambda each: each.one(Collector).collect(received)
        )

    async def follow(self, replica: int, generator: GeneratorReplica) -> None:
        await self.supervisor.ask(
            self.name, lambda each: each.one(Collector).follow(replica, generator)
        )


T = TypeVar("T")

STOP_LIMIT_S = 30.0  # for lost processes to end, before others take their place


class Supervisor:
    """Supervises the `executors` of a run through all its sessions; those that are lost in the
    present session are replaced there. `spawn` starts those of a further session."""

    def __init__(
        self,
        config: Config,
        executors: Executors,
        spawn: Callable[..., Awaitable[Executors]] | None = None,
    ) -> None:
        self._config, self.executors, self._spawn = config, executors, spawn
        has_session = executors.trainer is not None  # else nothing is started again
        self._restarts = Restarts(config.cluster.max_restarts * has_session)  # of all others
        most = config.generator.max_restarts * self.restarts_replicas
        self._replica_restarts = defaultdict[int, Restarts](lambda: Restarts(most))
        self._given_up: set[int] = set()  # replicas, with their hosts
        self._begin_session()

    def _begin_session(self) -> None:
        self._members: dict[str, Member] = {}
        for name in self.executors.by_name:
            self._member(name).serves.set()
        self._dispatch: Dispatch | None = None
        self._publisher: Publisher | None = None
        self._elasticity: Elasticity | None = None
        self._has_learnt = lambda: False
        self._watching: list[asyncio.Task[None]] = []
        self._is_over = asyncio.Event()
        self._error: Exception | None = None
        self._wanted = sorted(self.executors.generators)

    @property
    def restarts_replicas(self) -> bool:
        """Whether a replica that is lost is started again alone."""
        can = self._config.generator.max_restarts > 0 and self.executors.trainer is not None
        return can and not self._config.placement.colocated

    def connect(
        self,
        dispatch: Dispatch,
        publisher: Publisher,
        elasticity: Elasticity | None = None,
        has_learnt: Callable[[], bool] = lambda: False,
    ) -> None:
        """Supervise this session with these parts. Once it `has_learnt`, which means that the last
        version is made, only the trainer's loss ends the session; a call to any other executor that
        is lost for good raises."""
        self._dispatch, self._publisher = dispatch, publisher
        self._elasticity, self._has_learnt = elasticity, has_learnt
        if self.restarts_replicas:
            dispatch.on_lost = lambda index, why: self._lost(self._replica(index), why)

    async def watch(self) -> None:
        """Replace executors that are lost. Raises the loss that ends the session, or an error of
        its publishes."""
        for name, executor in self.executors.by_name.items():
            if self._is_vital(name) or not name.startswith("generator"):
                self._watch(self._member(name), executor)
        async with asyncio.TaskGroup() as tasks:
            if self._publisher is not None:
                tasks.create_task(self._publisher.watch())
            if self._elasticity is not None:
                tasks.create_task(self._elasticity.watch(self.replica_states, self.scale))
            await self._is_over.wait()
            assert self._error is not None
            raise self._error

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; an error of `watch` cancels it and is raised."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.watch())
            result = await tasks.create_task(work)
            watching.cancel()
        return result

    def processors(self) -> dict[Stage, Processor]:
        """Return, by stage, the processor that calls its executor and those that take its place."""
        stages = self.executors.stage_of.items()
        return {stage: FailoverStage(name, stage, self) for name, stage in stages}

    def collectors(self) -> list[Collector]:
        """Return one client per collector, for it and those that take its place. A new collector
        gets from the replicas what the lost one had not passed on."""
        return [FailoverCollector(executor.name, self) for executor in self.executors.collectors]

    async def ask(
        self,
        name: str,
        call: Callable[[Executor], Awaitable[T]],
        before_again: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Return the result of `call` on this executor. If the executor is lost meanwhile the call
        is repeated, once others have its place and `before_again` is done; so repeating it must do
        no harm."""
        member = self._member(name)
        while True:
            executor = await self._serving(member)
            try:
                return await call(executor)
            except ExecutorLost as loss:
                if loss.executor != name:  # what it needs, such as a storage unit
                    raise
                if executor is self.executors.by_name[name]:
                    self._lost(member, loss)
            await self._serving(member)
            if before_again is not None:
                await before_again()

    # The number of replicas, and the states of executors

    def status(self) -> list[ExecutorStatus]:
        """Return the status of all replicas, then of all other executors."""
        replicas = (f"generator-{index}" for index in self._all_replicas())
        others = (name for name in self.executors.by_name if not name.startswith("generator"))
        return [self._status(name) for name in (*replicas, *others)]

    def wanted(self) -> list[int]:
        """Return the indices of all replicas except those that are being removed."""
        return [i for i in self._all_replicas() if self._replica(i).leaving is None]

    def missing(self, num_replicas: int) -> list[int]:
        """Return the indices that `scale` starts to have so many: the lowest that are free, without
        those whose host was lost."""
        taken = {*self._all_replicas(), *self._given_up}
        free = (index for index in itertools.count() if index not in taken)
        return list(itertools.islice(free, max(0, num_replicas - len(self.wanted()))))

    def replica_states(self) -> list[str]:
        """Return the state of each replica: starting, joining, serving or draining."""
        return [self._status(f"generator-{index}").state for index in self._all_replicas()]

    async def scale(self, num_replicas: int, *, drains: bool = True) -> None:
        """Start or stop replicas until there are so many: `missing` ones are started, the highest
        ones stopped. Returns once those that are to be stopped have ended; others may still start.

        With `drains` a replica first writes the rollouts that it holds; otherwise they go on
        elsewhere.
        """
        for index in self.missing(num_replicas):
            log.info("generator %d is started", index)
            member = self._replica(index)
            member.starting = asyncio.create_task(self._start(member, 0.0))
        extra = [self._replica(index) for index in self.wanted()[num_replicas:]]
        leaving = [asyncio.create_task(self._remove(each, drains=drains)) for each in extra]
        for member, task in zip(extra, leaving, strict=True):
            member.leaving = task
        await asyncio.gather(*leaving)

    def _all_replicas(self) -> list[int]:
        """Return the indices of the replicas that are started or starting, without lost ones that
        are not replaced."""
        known, dispatch = set(self.executors.generators), self._dispatch
        if dispatch is not None and not self.restarts_replicas:
            known = {i for i in known if dispatch.expects(i) or self._is_vital(f"generator-{i}")}
        changing = (each for each in self._members.values() if each.starting or each.leaving)
        return sorted({*known, *(each.replica for each in changing if each.replica is not None)})

    def _status(self, name: str) -> ExecutorStatus:
        member, dispatch = self._member(name), self._dispatch
        if member.replica is None:
            state = "running" if member.serves.is_set() else "starting"
            is_alone = member.on_loss is OnLoss.ALONE
            return ExecutorStatus(name, state, num_restarts=member.num_losses if is_alone else None)
        serving = None if dispatch is None else dispatch.replicas.get(member.replica)
        state, held = "joining" if member.starting is None else "starting", (-1, 0, 0)
        if member.leaving is not None or serving is not None:
            state = "serving" if member.leaving is None else "draining"
        if serving is not None:
            held = serving.version, len(serving.running), serving.load
        return ExecutorStatus(name, state, *held, member.restarts.num_recent)

    # Losses in a session

    def _member(self, name: str) -> Member:
        if name not in self._members:
            role = role_of(name, self._config, self.executors.stage_of.get(name))
            replica = int(name.partition("-")[2]) if name.startswith("generator-") else None
            restarts = self._restarts if replica is None else self._replica_restarts[replica]
            self._members[name] = Member(name, replica, *ON_LOSS[role], restarts)
        return self._members[name]

    def _replica(self, index: int) -> Member:
        return self._member(f"generator-{index}")

    @property
    def _connected(self) -> tuple[Dispatch, Publisher]:
        assert self._dispatch is not None
        assert self._publisher is not None
        return self._dispatch, self._publisher

    def _is_vital(self, name: str) -> bool:
        """Return whether the loss of this executor ends the session. Without restarts a colocated
        replica's does not."""
        can_spare = name.startswith("generator") and self._restarts.limit == 0
        return self._member(name).on_loss is not OnLoss.ALONE and not can_spare

    def _watch(self, member: Member, executor: Executor) -> None:
        self._watching.append(asyncio.create_task(self._wait_lost(member, executor)))

    async def _wait_lost(self, member: Member, executor: Executor) -> None:
        try:
            await executor.watch()
        except ExecutorLost as loss:
            if executor is self.executors.by_name.get(member.name):
                self._lost(member, loss)

    def _lost(self, member: Member, why: Exception) -> None:
        """Handle the loss as `ON_LOSS` says. The same loss may be reported several times."""
        if member.leaving or member.failure or member.replica in self._given_up:
            return
        if member.starting is not None:
            member.lost_early = why
            return
        member.serves.clear()
        is_host_lost = isinstance(why, ExecutorLost) and not why.has_host
        on_loss = member.if_host_lost if is_host_lost else member.on_loss
        if on_loss is OnLoss.GIVEN_UP:
            return self._give_up(member, why)
        if on_loss is not OnLoss.ALONE:
            return self._fail(member, why)
        if (pause_s := member.restarts.take()) is None:
            return self._fail(member, member.lost_too_often(why))
        if member.replica is None:  # else the dispatcher has said so
            reason = str(why).splitlines()[0]
            log.warning("%s is started again, and nothing else: %s", member.name, reason)
        member.num_losses += 1
        member.starting = asyncio.create_task(self._start(member, pause_s))

    def _give_up(self, member: Member, why: Exception) -> None:
        """Go on without a replica whose host is lost, since nothing can be started there."""
        assert member.replica is not None
        assert isinstance(why, ExecutorLost)
        self._given_up.add(member.replica)
        if self.wanted() == [member.replica]:
            return self._fail(member, why)
        reason = why.reason.splitlines()[0]
        words = "generator %d is not started again, the others go on: %s"
        log.warning(words, member.replica, reason)
        member.leaving = asyncio.create_task(self._remove(member, drains=False))

    async def _start(self, member: Member, pause_s: float) -> None:
        """Start new processes in place of those that are lost, if there were any."""
        by_name, name = self.executors.by_name, member.name
        try:
            if (lost := by_name.get(name)) is not None:
                await asyncio.wait({asyncio.ensure_future(lost.stop())}, timeout=STOP_LIMIT_S)
                if lost.writer:  # it may go on writing
                    await self.executors.storage.fence(lost.writer)
            await asyncio.sleep(pause_s)
            by_name[name] = executor = await self.executors.start(name)
            member.lost_early = None  # that of the processes before
            await self._join(member, executor)
        except Exception as why:  # noqa: BLE001 - counts as one more loss, whatever it is
            log.warning("%s did not start: %s", name.replace("-", " "), why)
            member.lost_early = why
        member.starting = None
        if (lost_by := member.lost_early) is not None:
            member.lost_early = None
            if member.restarts.limit:
                return self._lost(member, lost_by)
            if (failed := by_name.pop(name, None)) is not None:
                await failed.stop()

    async def _join(self, member: Member, executor: Executor) -> None:
        for renewing in self.executors.renewals(executor):
            await unless_lost(renewing)
        if member.replica is not None:
            dispatch, publisher = self._connected
            dispatch.expect(member.replica, executor, self._served)
            return await publisher.connect_replica(member.replica, executor)
        self._watch(member, executor)
        member.restarts.succeeded()
        member.serves.set()

    def _served(self, index: int) -> None:
        """Note that the replica has its first version."""
        log.info("generator %d takes requests", index)
        self._replica(index).restarts.succeeded()

    async def _remove(self, member: Member, *, drains: bool) -> None:
        index, (dispatch, publisher) = member.replica, self._connected
        assert index is not None
        try:
            if member.starting is not None:
                await asyncio.wait({member.starting})  # a start that is cut short leaves processes
            if drains:
                await dispatch.drain(index)
            await publisher.drop(index)
            dispatch.remove(index)
            if (executor := self.executors.by_name.pop(member.name, None)) is not None:
                await executor.stop()
            log.info("generator %d is stopped", index)
        except Exception as error:  # noqa: BLE001 - raised again in `watch`
            self._fail(member, error)
        finally:
            del self._members[member.name]

    async def _serving(self, member: Member) -> Executor:
        await member.serves.wait()
        if member.failure is not None:
            raise member.failure
        return self.executors.by_name[member.name]

    def _fail(self, member: Member, error: Exception) -> None:
        """Give up a member that is lost for good."""
        member.failure = error
        member.serves.set()
        if not self._has_learnt() or member.name == "trainer":
            self._error = self._error or error
            self._is_over.set()
        elif member.replica is not None and self._dispatch is not None:
            self._dispatch.fail(error)

    # From one session to the next

    async def find_losses(self, *, of_all: bool = False) -> list[ExecutorLost]:
        """Return the losses of executors that the session cannot spare, or with `of_all` of any
        executor. It waits up to LOSS_GRACE_S for the first, since an error that a loss causes may
        come before the loss is noticed."""
        by_name = self.executors.by_name.items()
        watched = [each for name, each in by_name if of_all or self._is_vital(name)]
        if not watched:
            return []
        watches = [asyncio.ensure_future(executor.watch()) for executor in watched]
        done, pending = await asyncio.wait(
            watches, timeout=LOSS_GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        for watch in pending:
            watch.cancel()
        errors = [watch.exception() for watch in done]
        return [error for error in errors if isinstance(error, ExecutorLost)]

    def may_start_again(self, losses: Sequence[ExecutorLost]) -> bool:
        """Return whether a further session may follow one that ended with these losses, and count
        it as one restart. It may not where consumers outside hold rollouts, which would be
        repeated."""
        is_placed = bool(losses) and all(loss.has_host for loss in losses)
        has_consumers = any(stage.is_external for stage in self.executors.stage_of.values())
        if not is_placed or has_consumers:
            return False
        if (may := self._restarts.take() is not None) is False:
            self._restarts.warn()
        return may

    async def close(self) -> None:
        """Stop all starting, stopping and watching in this session."""
        self._wanted = self.wanted()
        members = self._members.values()
        changing = [task for each in members for task in (each.starting, each.leaving) if task]
        await cancel_all([*changing, *self._watching])

    async def end_session(self) -> None:
        """End all executors except the generators that are wanted, which forget the session."""
        self.executors = await end_others(self.executors, self._wanted)

    async def start_again(self, report: ReportState) -> ExecutorLost | None:
        """Start the executors of a further session. If one is lost meanwhile, return its loss; then
        only the generators that were kept are left."""
        assert self._spawn is not None
        try:
            self.executors = await self._spawn(
                report=report, replicas=self._wanted, before=self.executors
            )
        except ExecutorLost as loss:
            return loss
        self._restarts.succeeded()
        self._begin_session()
        return None


async def unless_lost(call: Awaitable[T]) -> T | None:
    """Return the result of `call`; None if an executor that it needs is lost."""
    try:
        return await call
    except ExecutorLost:
        return None
