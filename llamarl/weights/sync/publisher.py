"""Publish: bring new versions from the trainer's ranks into every generator replica.

Owns: when a publish begins and has ended, and which replicas keep their version. Does not own: the
replicas and their tasks (`replicas.py`) or bytes (trainer and generator processes move them).
Invariant: each replica that is not lost has the newest version or is on its way there, and none
waits for a slower one. Runs in the controller process and needs no torch.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from llamarl.config import WeightsConfig
from llamarl.errors import NoGenerator, ReplicaLost
from llamarl.metrics.span import Spans
from llamarl.protocols import WeightSource
from llamarl.weights.layout.kinds import WeightKind
from llamarl.weights.sync.replica_sync import PeerRelay, ReplicaSync, Source, SourceLost
from llamarl.weights.sync.replicas import PublishStats, Replicas
from llamarl.weights.sync.states import State
from llamarl.weights.sync.sync_calls import Stagger
from llamarl.weights.transports.routes import Routes

COMMIT_S = 0.5  # a replica that commits for longer does not hold back the next one
TURN_REPLICAS = 16  # this many commit one after the other: the others decode meanwhile


class Publisher:
    """Publishes versions from `trainer` to `generators` (by replica number).

    `rendezvous_folder` is where the ranks of collective routes meet; `kind_of` gives the kind of a
    replica's weights. `far_sites`: host -> site, of hosts at other sites than the trainer's.
    `on_commit(replica, version)` is called at each commit and `on_lost(replica, why)` for each
    replica given up, both also between publishes and while other replicas are busy. If `on_lost`
    returns a future, it ends once the lost replica cannot write into its siblings' memory any more;
    until then no sibling is connected to another source. `on_hold` gets the replicas that keep
    their version, and whether others that commit it will too. If replicas `may_come` later, a
    publish needs none.
    """

    def __init__(
        self,
        trainer: WeightSource,
        generators: Mapping[int, PeerRelay],
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
        self._straggler_timeout_s = config.straggler_timeout_s
        self._spans, self._on_commit, self._on_hold = spans, on_commit, on_hold
        self._may_come = may_come
        self._held_by_all = -1  # the version that every replica keeps
        self._trainer = Source("trainer", trainer)
        self._routes = Routes(
            config, rendezvous_folder=rendezvous_folder, kind_of=kind_of, far_sites=far_sites or {}
        )
        num_turns = math.ceil(len(generators) / TURN_REPLICAS) or 1
        self._replicas = Replicas(
            self._trainer,
            self._routes,
            spans,
            timeout_s=config.timeout_s,
            staggers=[Stagger(COMMIT_S) for _ in range(num_turns)],
            on_commit=self._committed,
            on_lost=on_lost,
        )

    @property
    def version(self) -> int:
        """The version published last, -1 before the first."""
        return self._trainer.version

    async def connect(self) -> None:
        """Connect all replicas given at the start; none is connected before all layouts fit.

        Any failure is raised: ValueError from the reshard plan, or what the executor raised.
        """
        waiting, self._waiting = self._waiting, {}
        try:
            await self._replicas.join(waiting)
        except (ReplicaLost, SourceLost) as error:
            raise error.__cause__ or error from None

    async def connect_replica(self, replica: int, generator: PeerRelay) -> None:
        """Let a replica take part, from the newest version on; again if it was restarted.

        Any failure of it is raised. If the head of its host fails, that one is lost and the next
        head is tried.
        """
        while True:
            await self.drop(replica)
            try:
                return await self._replicas.join({replica: generator})
            except ReplicaLost as error:
                raise error.__cause__ or error from None
            except SourceLost as error:
                self._replicas.give_up_source(error)

    async def drop(self, replica: int) -> None:
        """Forget a replica that left; its source unmaps its memory, and a sibling succeeds it. What
        takes its place does not keep the version that it was held at."""
        if replica in self._replicas.held:
            self._replicas.held.discard(replica)
            self._on_hold({*self._replicas.held}, self._held_by_all >= 0)
        await self._replicas.leave(replica)

    async def publish(self, version: int) -> PublishStats:
        """Bring `version`, the trainer's present weights, to the connected replicas.

        Returns once each at the trainer's site has it, is held, is lost or can no longer get it; or
        `weights.straggler_timeout_s` after the first has it: the others follow on their own. One
        that still takes an earlier version when this begins is not waited for. But replicas that
        the trainer sends several buckets are: the trainer must be able to write `version` until
        then.

        RuntimeError if it is not newer than the last one, a publish is running, or no replica is
        left and none may come; and the error that ended the replicas' tasks (see `watch`).
        """
        if self._replicas.error is not None:
            raise self._replicas.error
        if version <= self.version:
            raise RuntimeError(f"version {version} must be newer than {self.version}, the last one")
        if self._trainer.is_steady:
            raise RuntimeError(f"version {version} must wait until the running publish has ended")
        self._require_replicas(f"version {version} must have a connected generator")
        self._trainer.is_steady = True
        self._trainer.version = version
        self._replicas.change.notify()
        start_s = time.monotonic()
        try:
            with self._spans.span("publish", "publish", version=version):
                await self._spread(version)
        finally:
            self._trainer.is_steady = False
        done, self._replicas.stats = self._replicas.stats, PublishStats()
        return replace(done, seconds=time.monotonic() - start_s)

    @contextmanager
    def hold(self, version: int, at_most: int | None) -> Iterator[None]:
        """Let some replicas keep `version`, the last one published, while the block runs.

        `at_most` of them, and at most half so that the others go on; None: all that have it.
        Replicas that feed no other are chosen first. With None those that commit it while the block
        runs keep it too. RuntimeError if a newer version is under way, because then none is sure to
        keep it.
        """
        if version != self.version:
            raise RuntimeError(f"version {version} must be the one published last: {self.version}")
        syncs = self._replicas.syncs.values()
        held = [sync for sync in syncs if sync.version == version]
        if at_most is not None:
            sources = {sync.source for sync in syncs}
            held.sort(key=lambda sync: sync in sources)
            del held[max(1, min(at_most, len(syncs) // 2)) :]
        self._held_by_all = version if at_most is None else -1
        self._replicas.held |= {sync.replica for sync in held}
        self._on_hold({*self._replicas.held}, at_most is None)
        try:
            yield
        finally:
            self._held_by_all = -1
            self._replicas.held.clear()
            self._on_hold(set(), False)
            self._replicas.change.notify()

    async def watch(self) -> None:
        """Wait until an error ends the replicas' tasks, and raise it: FingerprintMismatch (a
        RuntimeError), TimeoutError if the trainer was silent, or what the trainer raised."""
        await self._replicas.change.until(lambda: self._replicas.error is not None)
        assert self._replicas.error is not None
        raise self._replicas.error

    async def close(self) -> None:
        """End the replicas' tasks; what is prepared and not committed is aborted."""
        await self._replicas.close()

    async def _spread(self, version: int) -> None:
        """Wait as long as a publish lasts."""
        replicas, until = self._replicas, self._replicas.change.until
        syncs = list(replicas.syncs.values())
        near = [sync for sync in syncs if not self._routes.is_far(sync.target)] or syncs
        near = [sync for sync in near if not self._is_behind(sync)] or near

        unsettled: list[ReplicaSync] = []  # the last of them is asked first, each a few times

        def is_over() -> bool:
            while unsettled and self._is_settled(unsettled[-1], version):
                unsettled.pop()
            if not unsettled:
                unsettled.extend(sync for sync in near if not self._is_settled(sync, version))
            return replicas.error is not None or not unsettled

        def has_committed() -> bool:
            return any(sync.version >= version for sync in syncs)

        def needs_trainer() -> bool:
            fed = (s for s in syncs if s.source is self._trainer and len(s.buckets) > 1)
            is_settled = all(self._is_settled(sync, version) for sync in fed)
            return self._trainer.num_readers > 0 or not is_settled

        await until(lambda: has_committed() or is_over())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._straggler_timeout_s):
                await until(is_over)
        await until(lambda: replicas.error or not needs_trainer())
        if replicas.error is not None:
            await self.close()
            raise replicas.error
        self._require_replicas(f"no generator took version {version}")

    def _is_behind(self, sync: ReplicaSync) -> bool:
        """Whether the replica, or one that feeds it, still takes an earlier version."""
        head = sync.source
        is_behind = sync.replica in self._replicas.updating
        return is_behind or (isinstance(head, ReplicaSync) and self._is_behind(head))

    def _committed(self, replica: int, version: int) -> None:
        if version == self._held_by_all:
            self._replicas.held.add(replica)
            self._on_hold({*self._replicas.held}, True)
        self._on_commit(replica, version)

    def _require_replicas(self, requirement: str) -> None:
        if not self._replicas.syncs and not self._may_come:
            why = next(iter(self._replicas.stats.lost.values()), None)
            raise NoGenerator(requirement) from why

    def _is_settled(self, sync: ReplicaSync, version: int) -> bool:
        """Whether waiting longer would not bring `version` to the replica."""
        if sync.state is State.GONE or max(sync.version, sync.refused) >= version:
            return True
        if sync.replica in self._replicas.held and len(sync.buckets) == 1:
            return True  # several buckets come only while a publish runs
        head = sync.source
        if not isinstance(head, ReplicaSync) or head.state is State.GONE:
            return False
        return head.version < version and self._is_settled(head, version)
