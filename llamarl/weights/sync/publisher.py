"""Publish: bring new versions from the trainer's ranks into every generator replica.

Owns: who is connected, which source feeds which replica, when a publish has ended. Does not own:
the protocol for one replica (`replica sync.py`), bytes (trainer and generator processes move them).
Invariant: every replica that is not lost gets to the newest version or is on its way there, none
waits for a slower one, and each byte leaves the trainer once per host. Runs in the controller
process and needs no torch.

    trainer -> head of host a -> the other replicas of host a
            -> head of host b -> the other replicas of host b

Each replica has a replica sync, a task that brings it from version to version and skips what has
been overtaken. An error of the trainer's side or a wrong fingerprint ends all of them. A replica
that raises or stays silent is lost: it is forgotten and reported, the others go on; if it was the
head of its host, the next one becomes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from llamarl.config import WeightsConfig
from llamarl.errors import NoGenerator, ReplicaLost, StaleVersion
from llamarl.metrics.span import Spans
from llamarl.protocols import WeightSource
from llamarl.weights.layout.boxes import Route
from llamarl.weights.layout.routes import Routes
from llamarl.weights.sync.calls import Change, Stagger, attempt, within
from llamarl.weights.sync.publish_stats import PublishStats
from llamarl.weights.sync.replica_sync import PeerRelay, ReplicaSync, Source, SourceLost

log = logging.getLogger(__name__)

COMMIT_S = 0.5  # a replica that commits for longer does not hold back the next one
TURN_REPLICAS = 16  # so many commit one after the other: the others decode meanwhile


class Publisher:
    """Publishes versions from `sender` to `receivers` (by replica number).

    `rendezvous_folder` is where collective routes meet; `generator_device` is cpu or cuda.
    `on_flip(replica, version)` hears of each commit, `on_lost(replica, why)` of each replica given
    up, both while the other replicas may still be busy, also between publishes. What `on_lost`
    returns, if anything, is done once that replica cannot write into its siblings' memory any more;
    until then they are not connected anew. `on_hold` gets the replicas that keep their version.
    """

    def __init__(
        self,
        sender: WeightSource,
        receivers: Mapping[int, PeerRelay],
        spans: Spans,
        config: WeightsConfig,
        *,
        rendezvous_folder: str,
        generator_device: str,
        on_commit: Callable[[int, int], None] = lambda replica, version: None,
        on_lost: Callable[[int, Exception], asyncio.Future[None] | None] = lambda replica, why: (
            None
        ),
        on_hold: Callable[[set[int]], None] = lambda replicas: None,
    ) -> None:
        self._waiting = dict(receivers)
        self._config = config
        self._spans = spans
        self._on_commit = on_commit
        self._on_lost = on_lost
        self._on_hold = on_hold
        self._trainer = Source(name="trainer", sender=sender)
        self._routes = Routes(
            config, rendezvous_folder=rendezvous_folder, generator_device=generator_device
        )
        self._syncs: dict[int, ReplicaSync] = {}  # in the order of connection
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()  # lost replicas that may still write
        self._change = Change()
        num_turns = math.ceil(len(receivers) / TURN_REPLICAS) or 1
        self._staggers = [Stagger(COMMIT_S) for _ in range(num_turns)]
        self._is_publishing = False
        self._error: BaseException | None = None
        self._stats = PublishStats()  # what the next publish to end tells

    @property
    def version(self) -> int:
        """The version published last, -1 before the first."""
        return self._trainer.version

    @property
    def replicas(self) -> list[int]:
        """The connected replicas."""
        return sorted(self._syncs)

    async def connect(self) -> None:
        """Connect all receivers given at the start; nothing is connected before all fit.

        Any failure is raised: ValueError from the planner, or what the executor raised.
        """
        waiting, self._waiting = self._waiting, {}
        try:
            await self._join(waiting)
        except (ReplicaLost, SourceLost) as error:
            raise error.__cause__ or error from None

    async def connect_replica(self, replica: int, generator: PeerRelay) -> None:
        """Let a replica take part, from the newest version on; again for one that was restarted.

        Any failure is raised; but if the head of its host is found to be lost, the next one is it.
        """
        while True:
            await self.drop(replica)
            try:
                return await self._join({replica: generator})
            except ReplicaLost as error:
                raise error.__cause__ or error from None
            except SourceLost as error:
                self._blame(error)

    async def drop(self, replica: int) -> None:
        """Forget a replica that left; its source unmaps its memory, its place is filled."""
        self._remove(replica)
        if replica in self._leaving:
            await self._leaving[replica]

    async def publish(self, version: int) -> PublishStats:
        """Bring `version`, the trainer's present weights, to the connected replicas.

        Returns once all have it, are held, lost or cannot have it any more, or
        `weights.straggler_timeout_s` after the first has it; the others follow on their own. But
        replicas that the trainer sends several parts are waited for: the trainer must be able to
        write `version` until then.

        RuntimeError if it is not newer than the last one, a publish is running, or no replica is
        left; and the error that ended the replica syncs (see `watch`).
        """
        if self._error is not None:
            raise self._error
        if version <= self.version:
            raise RuntimeError(f"version {version} must be newer than {self.version}, the last one")
        if self._is_publishing:
            raise RuntimeError(f"version {version} must wait until the running publish has ended")
        if not self._syncs:
            why = next(iter(self._stats.lost.values()), None)
            raise NoGenerator(f"version {version} must have a connected generator") from why
        self._is_publishing = self._trainer.is_steady = True
        self._trainer.version = version
        self._change.tell()
        start_s = time.monotonic()
        try:
            with self._spans.span("publish", "publish", version=version):
                await self._spread(version)
        finally:
            self._is_publishing = self._trainer.is_steady = False
        stats = replace(self._stats, version=version, seconds=time.monotonic() - start_s)
        self._stats = PublishStats()
        return stats

    @contextmanager
    def hold(self, version: int, at_most: int | None) -> Iterator[None]:
        """Some replicas keep `version`, the last one published, while the block runs.

        At most so many do, and at most half, so that the others go on; None: all that have it.
        Those come first that no other replica takes its weights from. RuntimeError if a newer
        version is under way: then none is sure to keep it.
        """
        if version != self.version:
            raise RuntimeError(f"version {version} must be the one published last: {self.version}")
        held = [sync for sync in self._syncs.values() if sync.version == version]
        if at_most is not None:
            sources = {sync.source for sync in self._syncs.values()}
            held.sort(key=lambda sync: sync.relay in sources)
            del held[max(1, min(at_most, len(self._syncs) // 2)) :]
        for sync in held:
            sync.is_held = True
        self._on_hold({sync.replica for sync in held})
        try:
            yield
        finally:
            for sync in held:
                sync.is_held = False
            self._on_hold(set())
            self._change.tell()

    async def watch(self) -> None:
        """Wait until an error ends the replica syncs, and raise it: FingerprintMismatch (a
        RuntimeError), TimeoutError if the trainer was silent, whatever the trainer's side
        raised."""
        await self._change.until(lambda: self._error is not None)
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """End all replica syncs; what was offered and not committed is discarded."""
        tasks = [sync.task for sync in self._syncs.values() if sync.task]
        tasks += self._leaving.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _spread(self, version: int) -> None:
        """Wait for the replica syncs as long as a publish lasts."""
        syncs = list(self._syncs.values())

        def is_over() -> bool:
            return self._error is not None or all(self._is_settled(sync, version) for sync in syncs)

        def has_committed() -> bool:
            return any(sync.version >= version for sync in syncs)

        def needs_trainer() -> bool:
            heads = [
                sync for sync in syncs if sync.source is self._trainer and len(sync.buckets) > 1
            ]
            is_settled = all(self._is_settled(head, version) for head in heads)
            return self._trainer.num_readers > 0 or not is_settled

        await self._change.until(lambda: has_committed() or is_over())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.straggler_timeout_s):
                await self._change.until(is_over)
        await self._change.until(lambda: self._error or not needs_trainer())
        if self._error is not None:
            await self.close()
            raise self._error
        if not self._syncs:
            why = next(iter(self._stats.lost.values()), None)
            raise NoGenerator(f"no generator took version {version}") from why

    def _is_settled(self, sync: ReplicaSync, version: int) -> bool:
        """Whether waiting longer would not bring `version` to the replica sync."""
        if sync.is_gone or max(sync.version, sync.refused) >= version:
            return True
        if sync.is_held and len(sync.buckets) == 1:  # several parts come only while a publish runs
            return True
        head = self._head(sync.source)
        return head is not None and head.version < version and self._is_settled(head, version)

    async def _join(self, generators: dict[int, PeerRelay]) -> None:
        """Exchange layouts, then connect, then start the replica syncs."""
        try:
            for replica, generator in generators.items():
                self._syncs[replica] = await self._meet(replica, generator)
            self._assign_sources()
            syncs = [self._syncs[replica] for replica in generators]
            routes = [await self._route(sync) for sync in syncs]
            for sync, (source, route) in zip(syncs, routes, strict=True):
                await sync.connect(source, route)
        except BaseException:
            for replica in generators:
                self._remove(replica)
            raise
        for sync in syncs:
            sync.task = asyncio.create_task(self._drive(sync))

    async def _meet(self, replica: int, generator: PeerRelay) -> ReplicaSync:
        timeout_s = self._config.timeout_s
        call = generator.target_layout()
        target = await within(call, timeout_s, f"generator {replica} layout")
        return ReplicaSync(
            replica,
            generator,
            target,
            timeout_s=timeout_s,
            change=self._change,
            stagger=self._staggers[replica % len(self._staggers)],
        )

    def _assign_sources(self) -> None:
        """The trainer feeds the first replica of each place, that one the others."""
        heads: dict[tuple[str | int, ...], ReplicaSync] = {}
        for sync in self._syncs.values():
            head = heads.setdefault(sync.place, sync)
            source = self._trainer if head is sync else head.relay
            if sync.source is not source:
                sync.source, sync.is_connected, sync.refused = source, False, -1
        self._change.tell()

    def _head(self, source: Source | None) -> ReplicaSync | None:
        """The replica sync of the replica that is this source; None for the trainer or one gone."""
        sync = self._syncs.get(source.replica) if source and source.replica is not None else None
        return sync if sync is not None and sync.relay is source else None

    async def _route(self, sync: ReplicaSync) -> tuple[Source, Route]:
        """The route of a replica sync, and what it starts from."""
        source = sync.source
        assert source is not None
        layout = await sync.layout_of(source)
        return source, self._routes.make(
            source.name,
            layout,
            sync.replica,
            sync.target,
            is_relay=source is not self._trainer,
        )

    async def _drive(self, sync: ReplicaSync) -> None:
        """The life of a replica sync: its replica gets whatever its source has."""
        try:
            while True:
                await self._change.until(
                    lambda: not sync.is_connected or sync.next_version() is not None
                )
                try:
                    await self._advance(sync)
                except SourceLost as error:
                    self._blame(error)
                    if sync.is_half_committed:
                        raise ReplicaLost(
                            f"{error}, amid generator {sync.replica}'s commit"
                        ) from error
        except ReplicaLost as why:
            self._lose(sync, why)
        except Exception as error:  # noqa: BLE001 - raised again in `watch` and `publish`
            self._fail(error)

    async def _advance(self, sync: ReplicaSync) -> None:
        """Connect the replica sync anew, or bring it to the version that its source has."""
        version = sync.next_version()
        if not sync.is_connected or version is None:
            while self._ending:
                await asyncio.wait(self._ending)
            return await sync.connect(*await self._route(sync))
        source = sync.source
        is_relayed = source is not self._trainer
        try:
            with self._spans.span("publish", "publish", version=version, replica=sync.replica):
                num_running = await sync.update(version)
        except StaleVersion as error:
            if sync.is_half_committed:
                raise ReplicaLost(f"{error}, amid generator {sync.replica}'s commit") from error
            if sync.source is source:  # another one may have it
                sync.refused = version
            sync.is_connected = False  # other ranks may still write: a new route ends the old one
        else:
            self._stats.num_running[sync.replica] = num_running
            self._stats.num_bytes += sync.num_bytes * (not is_relayed)
            self._stats.num_relayed_bytes += sync.num_bytes * is_relayed
            self._on_commit(sync.replica, version)
        self._change.tell()

    def _blame(self, error: SourceLost) -> None:
        """Give up the replica that failed to pass on its weights, if it is still there."""
        head = self._head(error.source)
        if head is not None:
            self._lose(head, ReplicaLost(str(error)))

    def _lose(self, sync: ReplicaSync, why: ReplicaLost) -> None:
        """Give a replica up."""
        if not sync.is_gone:
            self._stats.lost[sync.replica] = why
            self._remove(sync.replica)
            ending = self._on_lost(sync.replica, why)
            if ending is not None:
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def _fail(self, error: BaseException) -> None:
        """End all replica syncs for this error."""
        self._error = self._error or error
        self._cancel(self._syncs.values())
        self._change.tell()

    def _remove(self, replica: int) -> None:
        """Forget a replica; whoever feeds it does so too, in the background."""
        sync = self._syncs.pop(replica, None)
        if sync is None:
            return
        sync.is_gone, sync.relay.is_steady = True, False
        self._cancel([sync])
        self._assign_sources()
        if sync.route is not None:
            self._leaving[replica] = asyncio.create_task(self._disconnect(sync))

    @staticmethod
    def _cancel(syncs: Iterable[ReplicaSync]) -> None:
        for sync in syncs:
            if sync.task is not None and sync.task is not asyncio.current_task():
                sync.task.cancel()

    async def _disconnect(self, sync: ReplicaSync) -> None:
        """Let the source forget a replica that is gone, once nothing is written to it any more."""
        if sync.task is not None:
            await asyncio.wait({sync.task})
        source = sync.source
        assert source is not None
        if source is not self._trainer and self._head(source) is None:
            return
        call = source.sender.connect_target(sync.replica, None)
        task = await attempt(call, self._config.timeout_s)
        error = task.exception() if task.done() else TimeoutError("no answer")
        if error is not None and source is self._trainer and task.done():
            self._fail(error)
        elif error is not None:
            log.warning("%s did not forget generator %d: %r", source.name, sync.replica, error)
