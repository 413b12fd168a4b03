"""The replica sync of one replica: how one version gets from its source into it.

Owns: the protocol for one replica, and who is to blame for a failed call. Does not own: which
version when, or which source (`publisher.py`). Invariant: a part is committed only after its
fingerprint equals that of what was written; until the first commit the replica can go back to its
old version, from then on it gets the whole new one or is lost.

    per part: offer -> write -> fingerprint -> compare -> commit    or, after offer, discard
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from llamarl.errors import ReplicaLost, StaleVersion, TargetLost
from llamarl.protocols import WeightSource, WeightTarget
from llamarl.weights.integrity.comparison import add_up, compare
from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle
from llamarl.weights.layout.reshard import num_bytes
from llamarl.weights.layout.routes import MAPPED, parts_of, place_of
from llamarl.weights.sync.calls import Change, Stagger, attempt, silence

T = TypeVar("T")
ABORT_S = 5.0  # a replica slower than this does not hold back the error that it should hear of
PROBE_S = 5.0  # a source that answers within this is not silent


class PeerRelay(WeightTarget, WeightSource, Protocol):
    """A generator replica: it receives versions and passes them on."""


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """What feeds a replica sync: the trainer (`replica` None), or a replica of the same host.

    `version` is what it holds: the trainer the one published last, a replica its live one.
    `is_steady`: that version stays as long as `num_readers` replica syncs have committed some, not
    all of its parts. `layout` is where its ranks keep what they send. Of a replica, `target` is
    where they receive, and `sums` are the fingerprints of its version, compared before it was
    committed.
    """

    name: str
    sender: WeightSource
    replica: int | None = None
    layout: list[RankLayout] = field(default_factory=list)
    target: list[RankLayout] = field(default_factory=list)
    version: int = -1
    is_steady: bool = False
    num_readers: int = 0
    sums: dict[str, int] = field(default_factory=dict)


class SourceLost(Exception):  # noqa: N818 - an outcome more than an error
    """A replica that should pass on its weights raised (the cause) or did not answer in time."""

    def __init__(self, source: Source, why: str) -> None:
        super().__init__(why)
        self.source = source


class ReplicaSync:
    """A replica on its way from version to version.

    `relay` is the replica as a source for others. `refused` is the newest version that its source
    did not have any more. `is_half_flipped`: it has begun to commit, and not ended. `is_gone`: lost
    or dropped. `is_held`: it keeps the version that it has. `is_connected`: `route` leads from
    `source`; else it must be connected anew. ValueError if the layout's parts do not fit.
    """

    def __init__(
        self,
        replica: int,
        generator: PeerRelay,
        target: list[RankLayout],
        *,
        timeout_s: float,
        change: Change,
        stagger: Stagger,
    ) -> None:
        self.replica = replica
        self.target = target
        self.place = place_of(replica, target)
        self.buckets = parts_of(replica, target)
        self.relay = Source(
            name=f"generator-{replica}", sender=generator, replica=replica, target=target
        )
        self.source: Source | None = None
        self.is_connected = False
        self.is_gone = False
        self.is_half_committed = False
        self.is_held = False
        self.refused = -1
        self.route: Route | None = None
        self.num_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self._generator = generator
        self._timeout_s = timeout_s
        self._change = change
        self._stagger = stagger

    @property
    def version(self) -> int:
        """The live version, -1 before the first."""
        return self.relay.version

    def next_version(self) -> int | None:
        """What the source has for this replica, if anything.

        Between the parts of a version it must not change, so several need a steady source.
        """
        source = self.source
        if self.is_held or source is None or source.version <= max(self.version, self.refused):
            return None
        return source.version if len(self.buckets) == 1 or source.is_steady else None

    async def layout_of(self, source: Source) -> list[RankLayout]:
        """Where the source keeps what it can send, asked once. Raises as `connect` does."""
        if not source.layout:
            source.layout = await self._read(source, source.sender.source_layout(), "layout")
        return source.layout

    async def connect(self, source: Source, route: Route) -> None:
        """Tell both ends of the route at the same time; they may wait for each other.

        Raises ReplicaLost, SourceLost, or what the trainer raised (TimeoutError if nothing).
        """
        self.route = route
        receiving = asyncio.ensure_future(self._generator.connect_source(route))
        sending = asyncio.ensure_future(source.sender.connect_target(self.replica, route))
        tasks = {receiving, sending}
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        if receiving.done() or not sending.done():
            self._answer(receiving, "connect")
        self._result(source, sending, "connect")
        self._answer(receiving, "connect")
        self.num_bytes = num_bytes(route.copies)
        self.is_connected = self.source is source  # it may have got another one meanwhile

    async def update(self, version: int) -> int:
        """Bring `version` from the source into the replica; returns its running rollouts.

        Raises RuntimeError if it is not newer than what the replica has, StaleVersion, SourceLost,
        ReplicaLost, FingerprintMismatch, or what the trainer raised (TimeoutError if nothing).
        """
        source = self.source
        if source is None or version <= self.version:
            raise RuntimeError(
                f"version {version} must be newer than {self.version}, which generator "
                f"{self.replica} has"
            )
        is_known = source.version == version and source.target == self.target
        origin = source.sums if is_known else {}
        sums: dict[str, int] = {}
        async with AsyncExitStack() as stack:
            for bucket in range(len(self.buckets)):
                handles = await self._ask(self._generator.prepare(version, bucket), "prepare")
                try:
                    sums |= await self._fill(source, version, bucket, handles, origin)
                    if bucket == 0:
                        await stack.enter_async_context(self._committing(source, version))
                except BaseException:
                    await attempt(self._generator.abort(version), ABORT_S)
                    raise
                num_running = await self._ask(self._generator.commit(version, bucket), "commit")
        self.relay.version = version
        self.relay.sums = sums
        self.relay.is_steady = True
        self.is_half_committed = False
        return max(num_running)

    async def _fill(
        self,
        source: Source,
        version: int,
        bucket: int,
        handles: list[StagingHandle],
        origin: dict[str, int],
    ) -> dict[str, int]:
        """Have one part written and compare: with what was written, and with its `origin`."""
        written = add_up(await self._write(source, version, handles))
        answer = await self._ask(self._generator.verify(version, bucket), "verify")
        found = add_up(answer)
        is_relayed = source.replica is not None
        compare(written, found, self.replica, version, f" from {source.name}" * is_relayed)
        if origin:
            sent = {name: origin[name] for name in self.buckets[bucket] if name in origin}
            way = f" from the trainer through {source.name}"
            compare(sent, found, self.replica, version, way)
        return found

    async def _write(
        self, source: Source, version: int, handles: list[StagingHandle]
    ) -> list[dict[str, int]]:
        """Let the source write. Who answers anything else waits for a replica that is silent."""
        writing = await attempt(source.sender.write(version, handles), self._timeout_s)
        if not writing.done() and self.route and self.route.transport not in MAPPED:
            probe = await attempt(source.sender.source_layout(), PROBE_S)
            if probe.done() and not probe.cancelled() and probe.exception() is None:
                raise ReplicaLost(
                    f"generator {self.replica} must take what {source.name} writes within "
                    f"weights.timeout_s={self._timeout_s:g} s, got stuck"
                )
        return self._result(source, writing, "write")

    @asynccontextmanager
    async def _committing(self, source: Source, version: int) -> AsyncIterator[None]:
        """From the first part's commit to the last one's: alone, and on a version that stays."""
        is_reader = len(self.buckets) > 1
        async with self._stagger.alone():
            await self._change.until(lambda: not self.relay.num_readers)
            if is_reader and not (source.is_steady and source.version == version):
                raise StaleVersion(f"{source.name} goes on from version {version}")
            source.num_readers += is_reader
            self.relay.is_steady = False
            self.is_half_committed = True
            try:
                yield
            finally:
                source.num_readers -= is_reader
                self._change.tell()

    async def _ask(self, call: Coroutine[Any, Any, T], step: str) -> T:
        """The answer of the replica; whatever else happens makes it lost."""
        return self._answer(await attempt(call, self._timeout_s), step)

    async def _read(self, source: Source, call: Coroutine[Any, Any, T], step: str) -> T:
        """The answer of the source."""
        return self._result(source, await attempt(call, self._timeout_s), step)

    def _answer(self, task: asyncio.Future[T], step: str) -> T:
        if not task.done() or task.cancelled():
            raise ReplicaLost(
                f"generator {self.replica} must answer {step} within weights.timeout_s="
                f"{self._timeout_s:g} s, got no answer"
            )
        error = task.exception()
        if error is not None:
            raise ReplicaLost(f"generator {self.replica} failed at {step}: {error!r}") from error
        return task.result()

    def _result(self, source: Source, task: asyncio.Future[T], step: str) -> T:
        error: BaseException | None
        if not task.done() or task.cancelled():
            error = silence(f"{source.name} {step}", self._timeout_s)
        else:
            error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, TargetLost):
            raise ReplicaLost(f"{source.name} lost generator {self.replica}: {error}") from error
        if source.replica is None or isinstance(error, StaleVersion):
            raise error
        raise SourceLost(source, f"{source.name} failed at {step}: {error!r}") from error
