"""Publish: bring a new version from the trainer's ranks into every generator replica.

Owns: the two-phase protocol, the comparison of fingerprints, who is connected. Does not own: bytes
(trainer and generator processes move them). Invariant: a replica flips to a version only after the
fingerprint of what lies in its shadow equals that of what the trainer wrote; until the flip its
live weights are the old ones. Runs in the controller process and needs no torch.

Per replica, all replicas at once:

    offer(version) -> write -> fingerprint -> compare -> flip        or, after offer, discard

An error of the trainer's side or a wrong fingerprint stops the run. A replica that raises or stays
silent is lost: it is forgotten and reported, the others are published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from llamarl.metrics.span import Spans
from llamarl.protocols import Receiver, Sender
from llamarl.weights.layout import RankLayout
from llamarl.weights.plan import num_bytes, plan

T = TypeVar("T")
DISCARD_S = 5.0  # a replica slower than this does not hold back the error that it should hear of

MAX_NAMED = 8  # parameters that an error lists


class FingerprintMismatch(RuntimeError):  # noqa: N818 - names what was found
    """What lies in a generator's memory is not what the trainer wrote."""


class ReplicaLost(Exception):  # noqa: N818 - an outcome more than an error
    """A replica raised (the cause) or did not answer in time; it is connected no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """One publish. `num_bytes` counts what was written to the replicas that flipped.

    `num_running`: replica -> rollouts that were being decoded when it flipped. `lost`: replica ->
    why it is gone.
    """

    version: int
    seconds: float
    num_bytes: int
    num_running: dict[int, int]
    lost: dict[int, ReplicaLost]


class Publisher:
    """Publishes versions from `sender` to `receivers` (by replica number).

    `timeout_s` is the longest time one call may take. `version` is the last version published, -1
    before the first. `on_flip(replica, version)` hears of each flip, `on_lost(replica, why)` of
    each replica given up, both while the other replicas may still be busy.
    """

    def __init__(
        self,
        sender: Sender,
        receivers: dict[int, Receiver],
        spans: Spans,
        timeout_s: float,
        *,
        on_flip: Callable[[int, int], None] = lambda replica, version: None,
        on_lost: Callable[[int, Exception], None] = lambda replica, why: None,
    ) -> None:
        self.version = -1
        self._sender = sender
        self._waiting = dict(receivers)
        self._receivers: dict[int, Receiver] = {}
        self._num_bytes: dict[int, int] = {}
        self._source: list[RankLayout] = []
        self._spans = spans
        self._timeout_s = timeout_s
        self._on_flip = on_flip
        self._on_lost = on_lost
        self._is_publishing = False

    @property
    def replicas(self) -> list[int]:
        """The connected replicas."""
        return sorted(self._receivers)

    async def connect(self) -> None:
        """Exchange layouts with all receivers given at the start.

        Any failure is raised: ValueError from the planner, or what the executor raised.
        """
        for replica in list(self._waiting):
            await self.connect_replica(replica, self._waiting.pop(replica))

    async def connect_replica(self, replica: int, receiver: Receiver) -> None:
        """Let a replica take part from the next publish on; again for one that was restarted."""
        if not self._source:
            self._source = await self._within(self._sender.source_layout(), "trainer layout")
        what = f"layout of generator {replica}"
        target = await self._within(receiver.target_layout(), what)
        copies = plan(self._source, target)
        await self._within(self._sender.connect(replica, copies), "trainer connect")
        self._receivers[replica] = receiver
        self._num_bytes[replica] = num_bytes(copies)

    async def drop(self, replica: int) -> None:
        """Forget a replica that left; the trainer ranks unmap its memory."""
        if self._receivers.pop(replica, None) is not None:
            await self._within(self._sender.connect(replica, []), "trainer disconnect")

    async def publish(self, version: int) -> PublishStats:
        """Bring `version`, the trainer's present weights, into all connected replicas.

        RuntimeError if it is not newer than the last one, a publish is running, or no replica is
        left; FingerprintMismatch (a RuntimeError); TimeoutError if the trainer is silent; and
        whatever the trainer's side raises. The trainer must not step meanwhile.
        """
        if version <= self.version:
            raise RuntimeError(f"version {version} must be newer than {self.version}, the last one")
        if self._is_publishing:
            raise RuntimeError(f"version {version} must wait until the running publish has ended")
        if not self._receivers:
            raise RuntimeError(f"version {version} must have a connected generator to go to")
        self._is_publishing = True
        start_s = time.monotonic()
        try:
            with self._spans.span("publish", "publish", version=version):
                num_running, lost = await self._update_all(version)
        finally:
            self._is_publishing = False
        self.version = version
        return PublishStats(
            version=version,
            seconds=time.monotonic() - start_s,
            num_bytes=sum(self._num_bytes[replica] for replica in num_running),
            num_running=num_running,
            lost=lost,
        )

    async def _update_all(self, version: int) -> tuple[dict[int, int], dict[int, ReplicaLost]]:
        """Update every replica at once; the first fatal error ends the others and is raised."""
        tasks = {
            replica: asyncio.create_task(self._update(replica, receiver, version))
            for replica, receiver in self._receivers.items()
        }
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            results = {replica: task.result() for replica, task in tasks.items() if task.done()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        lost = {at: result for at, result in results.items() if isinstance(result, ReplicaLost)}
        if len(lost) == len(tasks):
            first = next(iter(lost.values()))
            raise RuntimeError(f"no generator took version {version}") from first
        for replica in lost:
            await self.drop(replica)
        return {at: result for at, result in results.items() if isinstance(result, int)}, lost

    async def _update(self, replica: int, receiver: Receiver, version: int) -> int | ReplicaLost:
        """The protocol for one replica; returns its running rollouts at the flip."""
        try:
            offers = await self._ask(replica, receiver.offer(version), "offer")
            is_verified = False
            try:
                written = await self._within(self._sender.write(version, offers), "trainer write")
                found = await self._ask(replica, receiver.fingerprint(version), "fingerprint")
                compare(_add_up(written), _add_up(found), replica, version)
                is_verified = True
            finally:
                if not is_verified:
                    await self._attempt(receiver.discard(version), DISCARD_S)
            num_running = await self._ask(replica, receiver.flip(version), "flip")
        except ReplicaLost as lost:
            self._on_lost(replica, lost)
            return lost
        self._on_flip(replica, version)
        return max(num_running)

    async def _ask(self, replica: int, call: Coroutine[Any, Any, T], step: str) -> T:
        """The answer of a receiver; whatever else happens makes the replica lost."""
        task = await self._attempt(call, self._timeout_s)
        if not task.done() or task.cancelled():
            raise ReplicaLost(
                f"generator {replica} must answer {step} within weights.timeout_s="
                f"{self._timeout_s:g} s, got no answer"
            )
        error = task.exception()
        if error is not None:
            raise ReplicaLost(f"generator {replica} failed at {step}: {error!r}") from error
        return task.result()

    @staticmethod
    async def _attempt(call: Coroutine[Any, Any, T], timeout_s: float) -> asyncio.Task[T]:
        """Wait for the call at most so long, then give it up; its outcome is left in the task."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()  # of a finished one: asyncio need not warn if nobody asks how it ended
        return task

    async def _within(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """The answer of a call whose failure ends the run."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError as error:
            raise TimeoutError(
                f"{what} must end within weights.timeout_s={self._timeout_s:g} s, got no answer"
            ) from error


def compare(written: dict[str, int], found: dict[str, int], replica: int, version: int) -> None:
    """FingerprintMismatch, naming the parameters, unless both fingerprints are equal."""
    wrong = sorted(
        name for name in written.keys() | found.keys() if written.get(name) != found.get(name)
    )
    if wrong:
        names = ", ".join(wrong[:MAX_NAMED])
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise FingerprintMismatch(
            f"publish of version {version} to generator {replica}: {names}{more} must arrive as "
            f"written, fingerprint {_hex(written, wrong[0])}, got {_hex(found, wrong[0])}"
        )


def _hex(fingerprints: dict[str, int], name: str) -> str:
    return f"{fingerprints[name]:016x}" if name in fingerprints else "none"


def _add_up(ranks: Iterable[dict[str, int]]) -> dict[str, int]:
    """Partial fingerprints of all ranks, added modulo 2^64."""
    total: dict[str, int] = {}
    for fingerprints in ranks:
        for name, value in fingerprints.items():
            total[name] = (total.get(name, 0) + value) % (1 << 64)
    return total
