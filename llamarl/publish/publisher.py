"""The publisher, which brings new versions from the trainer's ranks into every generator
replica."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from llamarl.core.config import WeightsConfig
from llamarl.core.errors import NoGenerator, ReplicaLost, StaleVersion
from llamarl.core.faces import AllRanks
from llamarl.metrics.span import Spans
from llamarl.publish.comparison import compare_frozen
from llamarl.publish.layout import RankLayout
from llamarl.publish.replica import (
    Change,
    ReplicaSync,
    Source,
    SourceLost,
    Stagger,
    State,
    WeightSource,
    WeightTarget,
    attempt,
    failure,
)
from llamarl.publish.reshard import SplitRoute, WeightKind, assign_sources, plan, split
from llamarl.publish.transports.routes import TRANSPORTS, mapped_on, named

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """The figures of one publish, and of the commits since the publish before.

    `num_running`: replica -> rollouts that were being decoded when it committed; empty if the
    trainer had gone on before any replica could take the version. `lost`: replica -> why it was
    lost."""

    seconds: float = 0.0
    num_running: dict[int, int] = field(default_factory=dict)
    lost: dict[int, ReplicaLost] = field(default_factory=dict)


COMMIT_S = 0.5  # a replica that commits for longer does not hold back the next one
TURN_REPLICAS = 16  # this many commit one after the other: the others decode meanwhile


class Publisher:
    """Publishes versions from `trainer` to `generators` (by replica number), which the trainer and
    their siblings feed.

    `rendezvous_folder` is where the ranks of collective routes meet; it is created when a route
    needs it. `kind_of` gives the kind of a replica's weights. `far_sites` maps host to site, for
    hosts at other sites than the trainer's. `on_commit(replica, version)` is called at each commit
    and `on_lost(replica, why)` for each replica given up, both also between publishes and while
    other replicas are busy. If `on_lost` returns a future, it ends once the lost replica cannot
    write into its siblings' memory any more; until then no sibling is connected to another source.
    `on_hold` gets the replicas that keep their version, and whether others that commit it will too.
    If replicas `may_come` later, a publish needs none."""

    def __init__(
        self,
        trainer: AllRanks,
        generators: Mapping[int, AllRanks],
        spans: Spans,
        config: WeightsConfig,
        *,
        rendezvous_folder: str,
        kind_of: Callable[[int], WeightKind],
        far_sites: Mapping[str, str] | None = None,
        on_commit: Callable[[int, int], None] = lambda replica, version: None,
        on_lost: Callable[[int, Exception], asyncio.Future[None] | None] = lambda replica, why: (
            None
        ),
        on_hold: Callable[[set[int], bool], None] = lambda replicas, may_be_more: None,
        may_come: bool = False,
    ) -> None:
        self._waiting = dict(generators)
        self._spans, self._config = spans, config
        self._rendezvous_folder, self._kind_of = rendezvous_folder, kind_of
        self._far_sites = far_sites or {}
        self._on_commit, self._on_lost, self._on_hold = on_commit, on_lost, on_hold
        self._may_come = may_come
        self._trainer = Source("trainer", trainer)
        num_turns = math.ceil(len(generators) / TURN_REPLICAS) or 1
        self._staggers = [Stagger(COMMIT_S) for _ in range(num_turns)]
        self._syncs: dict[int, ReplicaSync] = {}  # in the order they joined
        self._held: set[int] = set()  # replicas that keep their version
        self._held_by_all = -1  # the version that every replica keeps
        self._updating: set[int] = set()  # replicas that are being brought to a version
        self._is_publishing = False
        self._error: BaseException | None = None  # which ended the tasks of all replicas
        self._stats = PublishStats()  # since they were last taken
        # It is notified whenever any of this, a version or a state has changed: for the source
        # alone, if only the replicas that it feeds and the publish are concerned.
        self._change = Change()
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()  # lost replicas that may still write
        self._planned: dict[tuple[bool, WeightKind], tuple[object, tuple[SplitRoute, ...]]] = {}

    @property
    def version(self) -> int:
        """The version published last, -1 before the first."""
        return self._trainer.version

    async def connect(self) -> None:
        """Connect all replicas given at the start; none is connected before all layouts fit.

        Any failure is raised: ValueError from the reshard plan, or what the executor raised."""
        waiting, self._waiting = self._waiting, {}
        try:
            await self._join(waiting)
        except (ReplicaLost, SourceLost) as error:
            raise error.__cause__ or error from None

    async def connect_replica(self, replica: int, generator: AllRanks) -> None:
        """Let a replica take part, from the newest version on; again if it was restarted.

        Any failure of it is raised. If the head of its host fails, that one is lost and the next
        head is tried."""
        while True:
            await self.drop(replica)
            try:
                return await self._join({replica: generator})
            except ReplicaLost as error:
                raise error.__cause__ or error from None
            except SourceLost as error:
                self._give_up_source(error)

    async def drop(self, replica: int) -> None:
        """Forget a replica that left; its source unmaps its memory, and a sibling succeeds it. If
        it was held at a version, its successor is not."""
        if replica in self._held:
            self._held.discard(replica)
            self._on_hold({*self._held}, self._held_by_all >= 0)
        self._remove(replica)
        if replica in self._leaving:
            await self._leaving[replica]

    async def publish(self, version: int) -> PublishStats:
        """Bring `version`, the trainer's present weights, to the connected replicas.

        Returns once each replica at the trainer's site has it, is held, is lost or can no longer
        get it, or `weights.straggler_timeout_s` after the first one has it: the others follow on
        their own. A replica that is still taking an earlier version when this begins is not waited
        for.

        Raises RuntimeError if `version` is not newer than the last one, a publish is running, or no
        replica is left and none may come; and the error that ended the replicas' tasks (see
        `watch`)."""
        if self._error is not None:
            raise self._error
        if version <= self.version:
            raise RuntimeError(f"version {version} must be newer than {self.version}, the last one")
        if self._is_publishing:
            raise RuntimeError(f"version {version} must wait until the running publish has ended")
        self._require_replicas(f"version {version} must have a connected generator")
        self._is_publishing = True
        self._trainer.version = version
        self._change.notify()
        start_s = time.monotonic()
        try:
            with self._spans.span("publish", "publish", version=version):
                await self._spread(version)
        finally:
            self._is_publishing = False
        done, self._stats = self._stats, PublishStats()
        return replace(done, seconds=time.monotonic() - start_s)

    @contextmanager
    def hold(self, version: int, at_most: int | None) -> Iterator[None]:
        """Let some replicas keep `version`, the last one published, while the block runs.

        They are `at_most` as many, and at most half of all so that the others go on; None: all that
        have it. Replicas that feed no other are chosen first. With None, replicas that commit the
        version while the block runs keep it too. Raises RuntimeError if a newer version is on its
        way, because then none is sure to keep it."""
        if version != self.version:
            raise RuntimeError(f"version {version} must be the one published last: {self.version}")
        syncs = self._syncs.values()
        held = [sync for sync in syncs if sync.version == version]
        if at_most is not None:
            sources = {sync.source for sync in syncs}
            held.sort(key=lambda sync: sync in sources)
            del held[max(1, min(at_most, len(syncs) // 2)) :]
        self._held_by_all = version if at_most is None else -1
        self._held |= {sync.replica for sync in held}
        self._on_hold({*self._held}, at_most is None)
        try:
            yield
        finally:
            self._held_by_all = -1
            self._held.clear()
            self._on_hold(set(), False)
            self._change.notify()

    async def watch(self) -> None:
        """Wait until an error ends the replicas' tasks, and raise it: FingerprintMismatch (a
        RuntimeError), TimeoutError if the trainer was silent, or what the trainer raised."""
        await self._change.until(lambda: self._error is not None)
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """End all tasks; versions that are prepared and not committed are aborted."""
        tasks = [sync.task for sync in self._syncs.values() if sync.task]
        tasks += self._leaving.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, generators: dict[int, AllRanks]) -> None:
        """Exchange layouts, then connect, then start the tasks; if one fails, none joins.

        Raises ValueError if layouts do not fit, ReplicaLost, SourceLost, or what the trainer raised
        (TimeoutError if it did not answer)."""
        try:
            for replica, generator in generators.items():
                sync = self._syncs[replica] = await self._meet(replica, generator)
                frozen = [layout.frozen for layout in sync.target]
                if any(frozen):  # weights that no publish moves must equal the trainer's
                    source = await sync.layout_of(self._trainer)
                    compare_frozen([layout.frozen for layout in source], frozen, replica)
            self._assign_sources()
            joined = [self._syncs[replica] for replica in generators]
            routes = [await self._route(sync) for sync in joined]
            for sync, route in zip(joined, routes, strict=True):
                await sync.connect(*route)
        except BaseException:
            for replica in generators:
                self._remove(replica)
            raise
        for sync in joined:
            sync.task = asyncio.create_task(self._drive(sync))

    def _give_up_source(self, error: SourceLost) -> None:
        """Give up a replica that failed to feed another, unless it has gone already."""
        if isinstance(error.source, ReplicaSync):
            self._lose(error.source, ReplicaLost(str(error)))

    async def _meet(self, replica: int, generator: AllRanks) -> ReplicaSync:
        asked = await attempt(generator.all(WeightTarget.target_layout), self._config.timeout_s)
        error = failure(asked, f"generator {replica} layout", self._config.timeout_s)
        if error is not None:
            raise error
        return ReplicaSync(
            replica,
            generator,
            [self._shared(layout) for layout in asked.result()],
            timeout_s=self._config.timeout_s,
            stagger=self._staggers[replica % len(self._staggers)],
        )

    def _shared(self, layout: RankLayout) -> RankLayout:
        """Return the layout, with the parameters of a replica that looks alike if there is one, so
        that they are held once for all."""
        for sync in self._syncs.values():
            for known in sync.target:
                if known.rank == layout.rank and known.parameters == layout.parameters:
                    return replace(layout, parameters=known.parameters)
        return layout

    def _assign_sources(self) -> None:
        targets = {sync.replica: sync.target for sync in self._syncs.values()}
        sources = assign_sources(targets, self._far_sites, self._kind_of)
        for replica, head in sources.items():
            self._syncs[replica].feed_from(self._trainer if head is None else self._syncs[head])
        self._change.notify()

    def _is_far(self, sync: ReplicaSync) -> bool:
        """Return whether a replica is at another site than the trainer."""
        return sync.target[0].host in self._far_sites

    async def _route(self, sync: ReplicaSync) -> tuple[Source, SplitRoute, SplitRoute]:
        """Return the source of a replica, and the route from there for the ranks of either end.

        Raises ValueError if the layouts do not fit each other or the transport."""
        source, target = sync.source, sync.target
        assert source is not None
        layout, kind = await sync.layout_of(source), self._kind_of(sync.replica)
        is_relay = source is not self._trainer
        hosts = [sorted({rank.host for rank in ranks}) for ranks in (layout, target)]
        is_within = len({*hosts[0], *hosts[1]}) == 1
        name = mapped_on(kind.device) if is_relay and is_within else self._config.transport
        transport = TRANSPORTS[name]
        if not (is_within or transport.crosses_hosts):
            raise ValueError(
                f"weights.transport must be {named('crosses_hosts')} between hosts, got {name} "
                f"from {source.name} on {', '.join(hosts[0])} to generator {sync.replica} on "
                f"{', '.join(hosts[1])}"
            )
        rendezvous = ""
        if transport.meets:
            os.makedirs(self._rendezvous_folder, exist_ok=True)
            meeting = f"{source.name}-generator-{sync.replica}-{uuid.uuid4().hex}"
            rendezvous = os.path.join(self._rendezvous_folder, meeting)
        fields = {
            "source": source.name,
            "replica": sync.replica,
            "transport": name,
            "rendezvous": rendezvous,
            "is_slow": not is_relay and self._is_far(sync),
        }
        boxes = [[(r.rank, r.parameters) for r in ranks] for ranks in (layout, target)]
        planned, ends = self._planned.get((is_relay, kind), (None, ()))
        if planned != boxes:  # replicas of a kind mostly look alike, on whichever hosts they are
            ends = split(plan(layout, target), **fields)
            self._planned[is_relay, kind] = boxes, ends
        sending, receiving = (end.along(**fields) for end in ends)
        return source, sending, receiving

    async def _drive(self, sync: ReplicaSync) -> None:
        """Run the task of a replica, which brings it every version of its source until it
        leaves."""
        try:
            while True:
                await self._change.until(
                    lambda: not sync.is_connected or self._next_version(sync) is not None,
                    of=sync.source,
                )
                try:
                    await self._advance(sync)
                except StaleVersion:
                    pass
                except SourceLost as error:
                    self._give_up_source(error)
                self._change.notify(sync)
        except ReplicaLost as why:
            self._lose(sync, why)
        except Exception as error:  # noqa: BLE001 - raised again in `watch` and `publish`
            self._fail(error)

    def _next_version(self, sync: ReplicaSync) -> int | None:
        return None if sync.replica in self._held else sync.next_version()

    async def _advance(self, sync: ReplicaSync) -> None:
        """Connect the replica to its source, or bring it to the version that the source has."""
        version, source = self._next_version(sync), sync.source
        if not sync.is_connected or version is None:
            while self._ending:
                await asyncio.wait(self._ending)
            return await sync.connect(*await self._route(sync))
        try:
            with self._spans.span("publish", "publish", version=version, replica=sync.replica):
                self._updating.add(sync.replica)
                num_running = await sync.update(version)
        except StaleVersion:
            if sync.source is source:  # another one may have it
                sync.refused = version
            raise
        finally:
            self._updating.discard(sync.replica)
        self._stats.num_running[sync.replica] = num_running
        self._committed(sync.replica, version)

    def _lose(self, sync: ReplicaSync, why: ReplicaLost) -> None:
        """Give up a replica."""
        if self._syncs.get(sync.replica) is sync:
            self._stats.lost[sync.replica] = why
            self._remove(sync.replica)
            ending = self._on_lost(sync.replica, why)
            if ending is not None:
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _fail(self, error: BaseException) -> None:
        """End all tasks because of this error."""
        self._error = self._error or error
        _cancel(self._syncs.values())
        self._change.notify()

    def _remove(self, replica: int) -> None:
        """Forget a replica; in the background its source does so too."""
        sync = self._syncs.pop(replica, None)
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
        call = source.ranks.all(WeightSource.connect_target, sync.replica, None)
        task = await attempt(call, self._config.timeout_s)
        error = failure(task, f"{source.name} connect", self._config.timeout_s)
        if error is not None and source is self._trainer and task.done():
            self._fail(error)
        elif error is not None:
            log.warning("%s did not forget generator %d: %r", source.name, sync.replica, error)

    async def _spread(self, version: int) -> None:
        """Wait as long as a publish lasts."""
        until = self._change.until
        syncs = list(self._syncs.values())
        near = [sync for sync in syncs if not self._is_far(sync)] or syncs
        near = [sync for sync in near if not self._is_behind(sync)] or near

        unsettled: list[ReplicaSync] = []  # the last of them is asked first, each a few times

        def is_over() -> bool:
            while unsettled and self._is_settled(unsettled[-1], version):
                unsettled.pop()
            if not unsettled:
                unsettled.extend(sync for sync in near if not self._is_settled(sync, version))
            return self._error is not None or not unsettled

        def has_committed() -> bool:
            return any(sync.version >= version for sync in syncs)

        await until(lambda: has_committed() or is_over())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.straggler_timeout_s):
                await until(is_over)
        if self._error is not None:
            await self.close()
            raise self._error
        self._require_replicas(f"no generator took version {version}")

    def _is_behind(self, sync: ReplicaSync) -> bool:
        """Return whether the replica, or one that feeds it, is still taking an earlier version."""
        head = sync.source
        is_behind = sync.replica in self._updating
        return is_behind or (isinstance(head, ReplicaSync) and self._is_behind(head))

    def _committed(self, replica: int, version: int) -> None:
        if version == self._held_by_all:
            self._held.add(replica)
            self._on_hold({*self._held}, True)
        self._on_commit(replica, version)

    def _require_replicas(self, requirement: str) -> None:
        if not self._syncs and not self._may_come:
            why = next(iter(self._stats.lost.values()), None)
            raise NoGenerator(requirement) from why

    def _is_settled(self, sync: ReplicaSync, version: int) -> bool:
        """Return whether waiting longer would not bring `version` to the replica."""
        if sync.state is State.GONE or max(sync.version, sync.refused) >= version:
            return True
        if sync.replica in self._held:
            return True
        head = sync.source
        if not isinstance(head, ReplicaSync) or head.state is State.GONE:
            return False
        return head.version < version and self._is_settled(head, version)


def _cancel(syncs: Iterable[ReplicaSync]) -> None:
    """End the tasks of these replicas, except the one that runs this."""
    for sync in syncs:
        if sync.task is not None and sync.task is not asyncio.current_task():
            sync.task.cancel()
