"""The protocol of a publish for one replica: its states, its calls, and the way of a version from
its source into the replica."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from enum import Enum
from typing import Any, Concatenate, Protocol

from llamarl.core.errors import ReplicaLost, StaleVersion, TargetLost
from llamarl.core.faces import AllRanks, P, T, per_rank
from llamarl.publish.comparison import Fingerprints, add_up, compare
from llamarl.publish.layout import RankLayout, Route, StagingHandle
from llamarl.publish.reshard import SplitRoute
from llamarl.publish.transports.routes import TRANSPORTS


class WeightSource(Protocol):
    """A rank of the source of a publish."""

    async def source_layout(self) -> RankLayout:
        """Return where this rank keeps its boxes of the parameters."""

    async def connect_target(self, replica: int, route: Route | None) -> None:
        """Keep this rank's part of the route to `replica`, and wait for its other ranks. None
        forgets the replica and unmaps its memory."""

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        """Write `version` into the staging memory of one replica (a handle per rank).

        Returns the fingerprints of the written values, by parameter, for all the replica's ranks
        together: an element that several of them hold counts once for each. Raises StaleVersion if
        `version` can no longer be read, TargetLost if the replica cannot be reached."""


class WeightTarget(Protocol):
    """A rank of a generator replica in a publish."""

    async def target_layout(self) -> RankLayout:
        """Return where this rank wants its boxes of the parameters."""

    async def connect_source(self, route: Route) -> None:
        """Receive over this rank's part of the route that leads here, which replaces the route
        before, and wait for its other ranks."""

    async def prepare(self, version: int) -> StagingHandle:
        """Open the staging memory for `version` and return its handle."""

    async def verify(self, version: int) -> Fingerprints:
        """Return the fingerprints of all parameters that the rank holds in the staging memory.

        It waits until everything that the source wrote has arrived."""

    async def commit(self, version: int) -> int:
        """Make the version active between two decode steps. Returns the number of running
        rollouts."""

    async def abort(self, version: int) -> None:
        """Forget the prepared version; the active weights stay."""


class State(Enum):
    """The state of a replica in the protocol."""

    # No route leads here from its source: at the start, after an abort, after a new source.
    DISCONNECTED = "disconnected"
    # A route leads here, and nothing is prepared.
    IDLE = "idle"
    # A version is prepared: its source writes it, and both fingerprints are compared.
    STAGING = "staging"
    # The version has arrived as written, and waits until this replica may commit.
    VERIFIED = "verified"
    # The version becomes active between two decode steps.
    COMMITTING = "committing"
    # The replica was lost or dropped.
    GONE = "gone"


class Event(Enum):
    """An event of a replica."""

    CONNECT = "connect"  # both ends have the route
    DETACH = "detach"  # another source feeds it from now on
    PREPARE = "prepare"  # its ranks have opened their staging memory
    VERIFY = "verify"  # the fingerprints of what was written and of what arrived are equal
    COMMIT = "commit"  # it is its turn
    FINISH = "finish"  # the version is active
    ABORT = "abort"  # the write or the comparison failed; what was prepared is given up
    LEAVE = "leave"  # it failed, or was dropped


TRANSITIONS = {
    (State.DISCONNECTED, Event.CONNECT): State.IDLE,
    (State.IDLE, Event.DETACH): State.DISCONNECTED,
    (State.IDLE, Event.PREPARE): State.STAGING,
    (State.STAGING, Event.VERIFY): State.VERIFIED,
    # Ranks of the source may still write into the staging memory; only a new route ends that.
    (State.STAGING, Event.ABORT): State.DISCONNECTED,
    (State.VERIFIED, Event.ABORT): State.DISCONNECTED,
    (State.VERIFIED, Event.COMMIT): State.COMMITTING,
    (State.COMMITTING, Event.FINISH): State.IDLE,
    (State.GONE, Event.ABORT): State.GONE,
    **{(state, Event.LEAVE): State.GONE for state in State},
}


def next_state(state: State, event: Event) -> State:
    """Return the state after `event`. Raises RuntimeError if the table does not allow it."""
    if (state, event) not in TRANSITIONS:
        raise RuntimeError(f"event {event.value} must not happen in state {state.value}")
    return TRANSITIONS[state, event]


LATE_S = 1.0  # a timer that fires so late was not held up by other work of the event loop


async def attempt(call: Coroutine[Any, Any, T], timeout_s: float) -> asyncio.Task[T]:
    """Wait for the call, then cancel it if it has not ended; its outcome is left in the task.

    If the timer fires late, this process stood still meanwhile (Ctrl-Z stops the controller alone):
    the answer, which may lie there unread, gets as much time again."""
    task = asyncio.ensure_future(call)
    clock = asyncio.get_running_loop().time
    try:
        left_s = timeout_s
        while True:
            end_s = clock() + left_s
            await asyncio.wait({task}, timeout=left_s)
            late_s = clock() - end_s
            if task.done() or late_s < LATE_S:
                break
            left_s = min(late_s, timeout_s)
    finally:
        task.cancel()  # from then on asyncio does not log an exception left in the task
    return task


def failure(task: asyncio.Future[Any], what: str, timeout_s: float) -> BaseException | None:
    """Return the exception of an attempt; TimeoutError if it did not end, None if it succeeded."""
    if task.done() and not task.cancelled():
        return task.exception()
    return TimeoutError(f"{what} must end within weights.timeout_s={timeout_s:g} s, got no answer")


class Change:
    """A condition on state that tasks of one event loop share.

    `notify` wakes only the waiters whose predicate holds, and asks only those that the change may
    concern: with hundreds of replicas that all wait, a change of one concerns those that it
    feeds."""

    def __init__(self) -> None:
        self._waiting: defaultdict[object, dict[asyncio.Future[None], Callable[[], object]]] = (
            defaultdict(dict)
        )

    def notify(self, of: object = None) -> None:
        """Wake the tasks whose predicate holds now. If only `of` has changed, tasks that wait for
        something else are left out."""
        concerned = self._waiting if of is None else {None, of} & self._waiting.keys()
        for waiting in [self._waiting[each] for each in concerned]:
            for future, predicate in list(waiting.items()):
                if not future.done() and predicate():
                    future.set_result(None)

    async def until(self, predicate: Callable[[], object], of: object = None) -> None:
        """Return once `predicate()` is true. It becomes so by a change of `of` or one that concerns
        all; if `of` is None, by any change."""
        while not predicate():
            future = asyncio.get_running_loop().create_future()
            self._waiting[of][future] = predicate
            try:
                await future
            finally:
                del self._waiting[of][future]
                if not self._waiting[of]:
                    del self._waiting[of]


class Stagger:
    """Lets one task after the other into a block, the next one after `limit_s` at the latest."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Make other tasks wait while the block runs, for `limit_s` at most."""
        await self._lock.acquire()
        held = ExitStack()
        held.callback(self._lock.release)
        timer = asyncio.get_running_loop().call_later(self._limit_s, held.close)
        try:
            yield
        finally:
            timer.cancel()
            held.close()  # no effect if the timer has released the lock


ABORT_S = 5.0  # an abort that takes longer does not delay the error that caused it
PROBE_S = 5.0  # a source that answers another call within this time is not silent


class Source:
    """A source of replicas' weights: the trainer, or a replica (`ReplicaSync`) of the same host.

    `version` is the version that it holds: the trainer the one published last, a replica its active
    one. `sums` are the fingerprints of the version where they are known."""

    def __init__(self, name: str, ranks: AllRanks) -> None:
        self.name, self.ranks = name, ranks
        self.version = -1
        self.sums: dict[str, int] = {}
        self.layout: list[RankLayout] = []  # of what its ranks send; empty until asked


class SourceLost(Exception):  # noqa: N818 - an outcome more than an error
    """A replica that feeds others raised (the cause) or did not answer in time."""

    def __init__(self, source: Source, why: str) -> None:
        super().__init__(why)
        self.source = source


class ReplicaSync(Source):
    """A replica on its way from version to version; for its siblings it is a source.

    `target` is where its ranks want their boxes, `source` is its source, and `refused` the newest
    version that this source no longer had."""

    def __init__(
        self,
        replica: int,
        ranks: AllRanks,
        target: list[RankLayout],
        *,
        timeout_s: float,
        stagger: Stagger,
    ) -> None:
        super().__init__(f"generator-{replica}", ranks)
        self.replica, self.target = replica, target
        self.state = State.DISCONNECTED
        self.source: Source | None = None
        self.transport = ""  # of the route that leads here
        self.route_source: Source | None = None  # where it begins
        self.refused = -1
        self.task: asyncio.Task[None] | None = None
        self._timeout_s, self._stagger = timeout_s, stagger

    @property
    def is_connected(self) -> bool:
        """True if a route leads here from the present source."""
        return self.state is not State.DISCONNECTED and self.route_source is self.source

    def feed_from(self, source: Source) -> None:
        """Take the next versions from `source`; the route to it is still to be connected."""
        if source is not self.source:
            self.source, self.refused = source, -1

    def leave(self) -> None:
        """Mark the replica as lost or dropped."""
        self._move(Event.LEAVE)

    def next_version(self) -> int | None:
        """Return the version that the source has for this replica, if any."""
        source = self.source
        if source is None or source.version <= max(self.version, self.refused):
            return None
        return source.version

    async def layout_of(self, source: Source) -> list[RankLayout]:
        """Return where the source keeps its boxes, which is asked once. Raises as `connect`
        does."""
        if not source.layout:
            asked = await attempt(source.ranks.all(WeightSource.source_layout), self._timeout_s)
            source.layout = self._result(source, asked, "layout")
        return source.layout

    async def connect(self, source: Source, sending: SplitRoute, receiving: SplitRoute) -> None:
        """Give the route to both ends at the same time; they may wait for each other.

        Raises ReplicaLost, SourceLost, or what the trainer raised (TimeoutError if it did not
        answer)."""
        if self.state is State.IDLE:
            self._move(Event.DETACH)
        self.transport, self.route_source = receiving.route.transport, source
        connecting = self.ranks.all(WeightTarget.connect_source, per_rank(receiving))
        there = asyncio.ensure_future(connecting)
        routing = source.ranks.all(WeightSource.connect_target, self.replica, per_rank(sending))
        here = asyncio.ensure_future(routing)
        tasks = {there, here}
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        if there.done() or not here.done():
            self._answer(there, "connect")
        self._result(source, here, "connect")
        self._answer(there, "connect")
        self._move(Event.CONNECT)

    async def update(self, version: int) -> int:
        """Bring `version` from the source into the replica. Returns its number of running rollouts.

        Raises RuntimeError if `version` is not newer than the replica's, StaleVersion, SourceLost,
        ReplicaLost, FingerprintMismatch, or what the trainer raised (TimeoutError if it did not
        answer)."""
        source = self.source
        if source is None or version <= self.version:
            raise RuntimeError(
                f"version {version} must be newer than {self.version}, which generator "
                f"{self.replica} has"
            )
        is_alike = isinstance(source, ReplicaSync) and source.target == self.target
        origin = source.sums if is_alike and source.version == version else {}
        async with AsyncExitStack() as turn:
            handles = await self._ask(WeightTarget.prepare, version)
            self._move(Event.PREPARE)
            try:
                sums = await self._fill(source, version, handles, origin)
                self._move(Event.VERIFY)
                await turn.enter_async_context(self._stagger.alone())
                self._move(Event.COMMIT)
            except BaseException:
                await attempt(self.ranks.all(WeightTarget.abort, version), ABORT_S)
                self._move(Event.ABORT)
                raise
            num_running = await self._ask(WeightTarget.commit, version)
        self.version, self.sums = version, sums
        self._move(Event.FINISH)
        return max(num_running)

    def _move(self, event: Event) -> None:
        self.state = next_state(self.state, event)

    async def _fill(
        self,
        source: Source,
        version: int,
        handles: list[StagingHandle],
        origin: dict[str, int],
    ) -> dict[str, int]:
        """Have the version written, and compare the arrived fingerprints with the written ones and
        `origin`."""
        written = add_up(await self._write(source, version, handles))
        found = add_up(await self._ask(WeightTarget.verify, version))
        way = f" from {source.name}" if isinstance(source, ReplicaSync) else ""
        compare(written, found, self.replica, version, way)
        if origin:
            way = f" from the trainer through {source.name}"
            compare(origin, found, self.replica, version, way)
        return found

    async def _write(
        self, source: Source, version: int, handles: list[StagingHandle]
    ) -> list[Fingerprints]:
        """Let the source write; if its write hangs, find out which end is to blame.

        If the source answers another call meanwhile, the target is the end that hangs."""
        call = source.ranks.all(WeightSource.write, version, handles)
        writing = await attempt(call, self._timeout_s)
        if not writing.done() and not TRANSPORTS[self.transport].is_mapped:
            probe = await attempt(source.ranks.all(WeightSource.source_layout), PROBE_S)
            if failure(probe, "layout", PROBE_S) is None:
                raise ReplicaLost(
                    f"generator {self.replica} must take what {source.name} writes within "
                    f"weights.timeout_s={self._timeout_s:g} s, got stuck"
                )
        return self._result(source, writing, "write")

    async def _ask(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call the ranks of the replica."""
        call = self.ranks.all(method, *args, **kwargs)
        return self._answer(await attempt(call, self._timeout_s), method.__name__)

    def _answer(self, task: asyncio.Future[T], step: str) -> T:
        """Return the replica's answer. Raises ReplicaLost for anything else."""
        error = failure(task, f"generator {self.replica} {step}", self._timeout_s)
        if error is not None:
            raise ReplicaLost(f"generator {self.replica} failed at {step}: {error!r}") from error
        return task.result()

    def _result(self, source: Source, task: asyncio.Future[T], step: str) -> T:
        """Return the source's answer; for anything else raise the error of the end at fault."""
        error = failure(task, f"{source.name} {step}", self._timeout_s)
        if error is None:
            return task.result()
        if isinstance(error, TargetLost):
            raise ReplicaLost(f"{source.name} lost generator {self.replica}: {error}") from error
        if isinstance(error, StaleVersion) or not isinstance(source, ReplicaSync):
            raise error
        raise SourceLost(source, f"{source.name} failed at {step}: {error!r}") from error
