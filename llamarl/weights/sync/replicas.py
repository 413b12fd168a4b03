"""The connected replicas: each has a task that brings it from version to version.

Owns: who is connected, those tasks, and what follows from a failure. Does not own: which source
feeds whom (`layout/kinds.py`), the protocol for one replica (`replica_sync.py`) or when a publish
has ended (`publisher.py`). Invariant: a replica that raises or stays silent is lost alone; an error
of the trainer or a wrong fingerprint ends all tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from llamarl.errors import ReplicaLost, StaleVersion
from llamarl.metrics.span import Spans
from llamarl.weights.integrity.comparison import compare_frozen
from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.layout.split_route import SplitRoute
from llamarl.weights.sync.replica_sync import PeerRelay, ReplicaSync, Source, SourceLost
from llamarl.weights.sync.states import State
from llamarl.weights.sync.sync_calls import Change, Stagger, attempt, failure
from llamarl.weights.transports.routes import Routes

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """The figures of one publish, and what the replicas took between the one before and this one.

    `num_running`: replica -> rollouts that were being decoded when it committed; empty if the
    trainer had gone on before any replica could take the version. `lost`: replica -> why.
    """

    seconds: float = 0.0
    num_running: dict[int, int] = field(default_factory=dict)
    lost: dict[int, ReplicaLost] = field(default_factory=dict)


class Replicas:
    """The replicas that `trainer` and their siblings feed; see `Publisher` for the callbacks.

    `syncs`: by replica number, in the order they joined. `held`: those that keep their version.
    `error`: what ended all tasks. `stats`: what was done since they were last taken. `change` is
    notified whenever any of this, a version or a state has changed: of the source alone, if only
    those that it feeds and the publish are concerned.
    """

    def __init__(
        self,
        trainer: Source,
        routes: Routes,
        spans: Spans,
        *,
        timeout_s: float,
        staggers: Sequence[Stagger],
        on_commit: Callable[[int, int], None],
        on_lost: Callable[[int, Exception], asyncio.Future[None] | None],
    ) -> None:
        self.syncs: dict[int, ReplicaSync] = {}
        self.held: set[int] = set()
        self.updating: set[int] = set()  # those that are being brought to a version
        self.error: BaseException | None = None
        self.stats = PublishStats()
        self.change = Change()
        self._trainer, self._routes, self._spans = trainer, routes, spans
        self._timeout_s, self._staggers = timeout_s, staggers
        self._on_commit, self._on_lost = on_commit, on_lost
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()  # lost replicas that may still write

    async def join(self, generators: dict[int, PeerRelay]) -> None:
        """Exchange layouts, then connect, then start the tasks; if one fails, none joins.

        Raises ValueError if layouts do not fit, ReplicaLost, SourceLost, or what the trainer
        raised (TimeoutError if nothing).
        """
        try:
            for replica, generator in generators.items():
                self.syncs[replica] = await self._meet(replica, generator)
                await self._compare_frozen(self.syncs[replica])
            self._assign_sources()
            joined = [self.syncs[replica] for replica in generators]
            routes = [await self._route(sync) for sync in joined]
            for sync, route in zip(joined, routes, strict=True):
                await sync.connect(*route)
        except BaseException:
            for replica in generators:
                self._remove(replica)
            raise
        for sync in joined:
            sync.task = asyncio.create_task(self._drive(sync))

    async def leave(self, replica: int) -> None:
        """Forget a replica; returns once its source has unmapped its memory."""
        self._remove(replica)
        if replica in self._leaving:
            await self._leaving[replica]

    def give_up_source(self, error: SourceLost) -> None:
        """A replica failed to feed another: it is lost, unless it has gone already."""
        if isinstance(error.source, ReplicaSync):
            self._lose(error.source, ReplicaLost(str(error)))

    async def close(self) -> None:
        """End all tasks; what is prepared and not committed is aborted."""
        tasks = [sync.task for sync in self.syncs.values() if sync.task]
        tasks += self._leaving.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _meet(self, replica: int, generator: PeerRelay) -> ReplicaSync:
        asked = await attempt(generator.target_layout(), self._timeout_s)
        error = failure(asked, f"generator {replica} layout", self._timeout_s)
        if error is not None:
            raise error
        return ReplicaSync(
            replica,
            generator,
            [self._shared(layout) for layout in asked.result()],
            timeout_s=self._timeout_s,
            change=self.change,
            stagger=self._staggers[replica % len(self._staggers)],
        )

    async def _compare_frozen(self, sync: ReplicaSync) -> None:
        """FingerprintMismatch unless the weights that no publish moves are the trainer's."""
        target = [layout.frozen for layout in sync.target]
        if any(target):
            source = await sync.layout_of(self._trainer)
            compare_frozen([layout.frozen for layout in source], target, sync.replica)

    def _shared(self, layout: RankLayout) -> RankLayout:
        """The layout; its parameters are those of a replica that looks alike, held once for all."""
        for sync in self.syncs.values():
            for known in sync.target:
                if known.rank == layout.rank and known.parameters == layout.parameters:
                    return replace(layout, parameters=known.parameters)
        return layout

    def _assign_sources(self) -> None:
        targets = {sync.replica: sync.target for sync in self.syncs.values()}
        for replica, head in self._routes.sources(targets).items():
            self.syncs[replica].feed_from(self._trainer if head is None else self.syncs[head])
        self.change.notify()

    async def _route(self, sync: ReplicaSync) -> tuple[Source, SplitRoute, SplitRoute]:
        """The source of a replica, and the route from there for the ranks of either end."""
        source = sync.source
        assert source is not None
        layout = await sync.layout_of(source)
        is_relay = source is not self._trainer
        ends = self._routes.make(source.name, layout, sync.replica, sync.target, is_relay=is_relay)
        return source, *ends

    async def _drive(self, sync: ReplicaSync) -> None:
        """The task of a replica: it gets whatever its source has, until it leaves."""
        try:
            while True:
                await self.change.until(
                    lambda: not sync.is_connected or self._next_version(sync) is not None,
                    of=sync.source,
                )
                try:
                    await self._advance(sync)
                except (SourceLost, StaleVersion) as error:
                    if isinstance(error, SourceLost):
                        self.give_up_source(error)
                    if sync.state is State.GONE:
                        raise ReplicaLost(
                            f"{error}, amid generator {sync.replica}'s commit"
                        ) from error
                self.change.notify(sync)
        except ReplicaLost as why:
            self._lose(sync, why)
        except Exception as error:  # noqa: BLE001 - raised again in `watch` and `publish`
            self._fail(error)

    def _next_version(self, sync: ReplicaSync) -> int | None:
        return None if sync.replica in self.held else sync.next_version()

    async def _advance(self, sync: ReplicaSync) -> None:
        """Connect the replica to its source, or bring it to the version that the source has."""
        version, source = self._next_version(sync), sync.source
        if not sync.is_connected or version is None:
            while self._ending:
                await asyncio.wait(self._ending)
            return await sync.connect(*await self._route(sync))
        try:
            with self._spans.span("publish", "publish", version=version, replica=sync.replica):
                self.updating.add(sync.replica)
                num_running = await sync.update(version)
        except StaleVersion:
            if sync.source is source:  # another one may have it
                sync.refused = version
            raise
        finally:
            self.updating.discard(sync.replica)
        self.stats.num_running[sync.replica] = num_running
        self._on_commit(sync.replica, version)

    def _lose(self, sync: ReplicaSync, why: ReplicaLost) -> None:
        """Give a replica up."""
        if self.syncs.get(sync.replica) is sync:
            self.stats.lost[sync.replica] = why
            self._remove(sync.replica)
            ending = self._on_lost(sync.replica, why)
            if ending is not None:
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _fail(self, error: BaseException) -> None:
        """End all tasks for this error."""
        self.error = self.error or error
        _cancel(self.syncs.values())
        self.change.notify()

    def _remove(self, replica: int) -> None:
        """Forget a replica; in the background its source does so too."""
        sync = self.syncs.pop(replica, None)
        if sync is None:
            return
        sync.leave()
        _cancel([sync])
        self._assign_sources()
        if sync.route_source is not None:
            self._leaving[replica] = asyncio.create_task(self._disconnect(sync, sync.route_source))

    async def _disconnect(self, sync: ReplicaSync, source: Source) -> None:
        """Let the source forget a replica that is gone, once nothing is written to it any more."""
        if sync.task is not None:
            await asyncio.wait({sync.task})
        if isinstance(source, ReplicaSync) and source.state is State.GONE:
            return
        call = source.executor.connect_target(sync.replica, None)
        task = await attempt(call, self._timeout_s)
        error = failure(task, f"{source.name} connect", self._timeout_s)
        if error is not None and source is self._trainer and task.done():
            self._fail(error)
        elif error is not None:
            log.warning("%s did not forget generator %d: %r", source.name, sync.replica, error)


def _cancel(syncs: Iterable[ReplicaSync]) -> None:
    """End the tasks of these replicas, except the one that runs this."""
    for sync in syncs:
        if sync.task is not None and sync.task is not asyncio.current_task():
            sync.task.cancel()
