"""How the loss of an executor is mended, and how often.

Owns: the table by role, limits and pauses, what is known of an executor in a session, and calls
that survive a loss. Does not own: the executors, or what is done about a loss (`fleet.py`).
Invariant: every role that a run may have is in the table, which docs/running.md shows too.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from llamarl.config import Config
from llamarl.dataflow.graph import SCORE, Stage
from llamarl.errors import NoGenerator
from llamarl.loop.balance import Replica
from llamarl.protocols import Storage
from llamarl.types import StageItem, StageResult

log = logging.getLogger(__name__)

WINDOW_S = 3600.0  # over which restarts are counted
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a restart; doubled after each that fails


class Mending(StrEnum):
    """What follows the loss of an executor."""

    ALONE = "alone"
    """It is started again, while the run goes on."""
    SESSION = "session"
    """All but the generators is started again, and goes on from the newest checkpoint."""
    GIVEN_UP = "given up"
    """The others go on without it; the loss of the last one ends the run."""
    ENDS = "ends the run"


MENDING = {
    "generator replica": (Mending.ALONE, Mending.GIVEN_UP),
    # Its device is the trainer's in some phases, and so is its host.
    "colocated generator replica": (Mending.SESSION, Mending.ENDS),
    "collector": (Mending.ALONE, Mending.ENDS),
    "scorer": (Mending.ALONE, Mending.ENDS),
    "frozen model": (Mending.ALONE, Mending.ENDS),
    "stage of the recipe's own": (Mending.ALONE, Mending.ENDS),
    "environment": (Mending.ALONE, Mending.ENDS),
    # These hold rollouts, which would be repeated.
    "stage with consumers outside": (Mending.ENDS, Mending.ENDS),
    "trainer": (Mending.SESSION, Mending.ENDS),
    "storage unit": (Mending.SESSION, Mending.ENDS),
}
"""By role: how a loss is mended, and how one with the host, where nothing can be started."""


def role_of(name: str, config: Config, stage: Stage | None = None) -> str:
    """Of the executor of this name, which may run a `stage` between generate and settle."""
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
    """Restarts of one executor, or of several together: `limit` within an hour, each after a pause
    that doubles until one succeeds."""

    limit: int
    _begun_s: deque[float] = field(default_factory=deque)
    _num_failed: int = 0  # in a row

    @property
    def num_recent(self) -> int:
        """Within the last hour."""
        now_s = asyncio.get_running_loop().time()
        while self._begun_s and self._begun_s[0] < now_s - WINDOW_S:
            self._begun_s.popleft()
        return len(self._begun_s)

    def take(self) -> float | None:
        """The pause before one more, in seconds; None if there may be no more now."""
        if self.num_recent >= self.limit:
            return None
        self._begun_s.append(asyncio.get_running_loop().time())
        pause_s = FIRST_PAUSE_S * 2.0**self._num_failed
        self._num_failed += 1
        return min(pause_s, LONGEST_PAUSE_S)

    def warn(self) -> None:
        """Say that there were too many, of executors that are no generators."""
        if self.limit:
            words = "executors were lost more often than cluster.max_restarts=%d times in an hour"
            log.warning(words, self.limit)

    def succeeded(self) -> None:
        """What was started works."""
        self._num_failed = 0


class ExecutorStatus(NamedTuple):
    """What an executor does; None for what it has not. `version` is -1 before a replica's first
    commit; `num_running` counts the rollouts that it holds, `load` the tokens that they may still
    take; `num_restarts` those within an hour, of all but a replica in this session."""

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
    mending: Mending
    if_host_lost: Mending
    restarts: Restarts
    num_losses: int = 0
    starting: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    lost_early: Exception | None = None  # while it was started
    failure: Exception | None = None  # it is lost for good
    serves: asyncio.Event = field(default_factory=asyncio.Event)  # or has failed

    def lost_too_often(self, why: Exception) -> Exception:
        """What ends the run, with the key to raise."""
        if self.replica is None:
            self.restarts.warn()
            return why
        error = NoGenerator(
            f"generator {self.replica} must not be lost more often than generator.max_restarts="
            f"{self.restarts.limit} times within an hour"
        )
        error.__cause__ = why
        return error


def status_of(member: Member, serving: Replica | None) -> ExecutorStatus:
    """What it does; `serving` is the dispatcher's side of a replica that gets requests."""
    name, is_alone = member.name, member.mending is Mending.ALONE
    if member.replica is None:
        state = "running" if member.serves.is_set() else "starting"
        return ExecutorStatus(name, state, num_restarts=member.num_losses if is_alone else None)
    state = "joining" if member.starting is None else "starting"
    if member.leaving is not None or serving is not None:
        state = "serving" if member.leaving is None else "draining"
    held = (-1, 0, 0) if serving is None else (serving.version, len(serving.running), serving.load)
    return ExecutorStatus(name, state, *held, member.restarts.num_recent)


Ask = Callable[..., Coroutine[Any, Any, Any]]
"""`Fleet.ask`."""


@dataclass(frozen=True)
class MendedStage:
    """protocols.Processor of `stage`, which the executor `name` runs: a call to one that is lost is
    repeated by the next. It can be, since all that it reads is in storage, and what it found is not
    used before it has ended. What the lost one wrote is erased before."""

    name: str
    stage: Stage
    storage: Storage
    ask: Ask

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        """See `protocols.Processor`."""
        row_ids = [row_id for rows, _ in items for row_id in rows]
        columns = [column.name for column in self.stage.writes]
        erase = partial(self.storage.erase, row_ids, columns)
        results: Sequence[StageResult]
        results = await self.ask(self.name, lambda calls: calls.process(items), erase)
        return results


@dataclass(frozen=True)
class MendedCalls:
    """The methods of the executor `name`, and of those that take its place: each call goes to the
    next if one is lost, so that must do no harm."""

    name: str
    ask: Ask

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self.ask(self.name, lambda calls: getattr(calls, method)(*args))
