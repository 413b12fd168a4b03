"""The order in which generators and trainer use a shared device.

    begin -> sync phase -> train -> sync phase -> train -> ... -> sync phase -> train (the export)

If generators and trainer share a device, only one side has all its memory there; both have their
weights there only in a sync phase, which copies them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llamarl.core.errors import ExecutorLost, NoGenerator
from llamarl.core.faces import Offloadable
from llamarl.metrics.span import Spans

log = logging.getLogger(__name__)

When = Callable[[], Awaitable[None]]
RECALL_S = 10.0  # for generators to make room at an early end


class Phase(StrEnum):
    """A use of a shared device; phases alternate, in this order."""

    SYNC = "sync"
    """A publish: both sides have their weights on the device."""
    TRAIN = "train"
    """Everything that the trainer computes."""


class Colocation:
    """Grants the controller the device for a phase. In this class generators and trainer have
    devices of their own, so nothing changes, and no phase waits, not even for `when`."""

    async def begin(self) -> None:
        """Prepare the first phase. Call it once all executors have started."""

    @asynccontextmanager
    async def phase(self, phase: Phase, when: When | None = None) -> AsyncIterator[None]:
        """Run the body as `phase`; `when` waits until the generators can spare their device."""
        yield

    async def recall(self) -> None:
        """Give the trainer the device at once, so that a run that ends early can be saved."""


@dataclass(eq=False, kw_only=True)
class Alternating(Colocation):
    """Makes phases alternate, in whatever order they are asked for; a train phase waits for
    `when`."""

    _num_phases: int = 0
    _ended: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def phase(self, phase: Phase, when: When | None = None) -> AsyncIterator[None]:
        """Run the body once the phase before has ended and `when` has returned. A body that fails
        ends the run."""
        place = list(Phase).index(phase)
        async with self._ended:
            await self._ended.wait_for(lambda: self._num_phases % len(Phase) == place)
        async with self._train(when) if phase is Phase.TRAIN else self._sync():
            yield
        async with self._ended:
            self._num_phases += 1
            self._ended.notify_all()

    @asynccontextmanager
    async def _train(self, when: When | None) -> AsyncIterator[None]:
        if when is not None:
            await when()
        yield

    @asynccontextmanager
    async def _sync(self) -> AsyncIterator[None]:
        yield


@dataclass(eq=False)
class Colocated(Alternating):
    """Lets generators and trainer alternate on a device that they share.

    The generators work until the `when` of a train phase returns, then from the end of the next
    sync phase on; the sides change places before each phase. A lost generator takes part in no
    further phase; once all are lost, NoGenerator is raised.
    """

    trainer: Offloadable
    generators: dict[int, Offloadable]
    spans: Spans
    _since_ns: int = field(default_factory=time.monotonic_ns)

    async def begin(self) -> None:
        """Offload what the trainer has loaded, for the generators have the device first."""
        await self.trainer.offload(["state", "weights"])
        self._since_ns = time.monotonic_ns()

    async def recall(self) -> None:
        """Bring the trainer back to the device. Generators that do not offload in time are left: a
        lost one holds no memory any more, and one in the middle of a publish may be unable to."""
        calls = (each.offload(["kv", "weights"]) for each in self.generators.values())
        offloading = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.wait([offloading], timeout=RECALL_S)
        await self.trainer.onload(["weights", "state"])

    @asynccontextmanager
    async def _train(self, when: When | None) -> AsyncIterator[None]:
        await self.trainer.prefetch(["weights", "state"])
        if when is not None:
            await when()
        self._record("generators")
        with self._switch(Phase.TRAIN):
            await self._each(lambda generator: generator.offload(["kv", "weights"]))
            await self.trainer.onload(["weights", "state"])
        await self._each(lambda generator: generator.prefetch(["weights", "kv"]))
        yield
        self._record("trainer")

    @asynccontextmanager
    async def _sync(self) -> AsyncIterator[None]:
        """Bring both sides' weights to the device, and nothing else. The generators have the device
        before the first sync phase, the trainer before all others."""
        with self._switch(Phase.SYNC):
            await self.trainer.offload(["state"])
            await self._each(lambda generator: generator.offload(["kv"]))
            await self.trainer.onload(["weights"])
            await self._each(lambda generator: generator.onload(["weights"]))
        yield
        self._record("both")
        with self._switch(Phase.SYNC):
            await self.trainer.offload(["weights"])
            await self._each(lambda generator: generator.onload(["kv"]))

    async def _each(self, ask: Callable[[Offloadable], Coroutine[Any, Any, None]]) -> None:
        """Ask all generators at once; lost ones are not asked again."""
        replicas = list(self.generators)
        calls = (ask(self.generators[replica]) for replica in replicas)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, ExecutorLost):
                log.warning("generator %d takes part in no more phases: %s", replica, outcome)
                del self.generators[replica]
                if not self.generators:
                    raise NoGenerator("every generator replica is lost") from outcome
            elif outcome is not None:
                raise outcome

    def _record(self, who: str) -> None:
        """Record which side has had the device since the last switch."""
        self.spans.record("phase", self._since_ns, time.monotonic_ns(), "mark", who=who)

    @contextmanager
    def _switch(self, phase: Phase) -> Iterator[None]:
        """Time a switch of the device; the executors record the bytes."""
        start_ns = time.monotonic_ns()
        yield
        self._since_ns = time.monotonic_ns()
        self.spans.record("switch", start_ns, self._since_ns, "mark", to=str(phase))
