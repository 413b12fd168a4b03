"""The calls that executors answer, by role (face), and those by which observers follow a run. The
worker of each rank inherits its faces; `Executor.one` gives a face as its callers see it, and
`AllRanks.all` calls a method of one for the results of all ranks. The faces of a publish stand in
`publish/replica.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from llamarl.core.groups import Batch, Evaluation, Group, StepStats, Verdict
from llamarl.core.records import (
    Columns,
    Outcome,
    Request,
    RolloutInfo,
    StageItem,
    StageResult,
    TurnItem,
    TurnResult,
)

Report = tuple[int, list[RolloutInfo]]
"""Rows that stopped on a replica, in that order, and the number of the first. Each row's number is
one above that of the row before; those of later processes are higher."""


P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """One rank of an executor. Its process makes it with `Class(spec, rank=, num_ranks=,
    spans=)`."""

    async def start(self) -> None:
        """Load everything that takes long; called once, on all ranks."""

    async def close(self) -> None:
        """Give all resources back, however far `start` came."""


class PerRank(ABC, Generic[T]):
    """An argument of a call to all ranks of which each rank gets only a part of its own."""

    @abstractmethod
    def for_rank(self, rank: int) -> T:
        """Return the argument that this rank is called with."""

    @abstractmethod
    def for_ranks(self, ranks: range) -> Self:
        """Return the argument for these ranks alone, to be sent to them."""


def per_rank(parts: PerRank[T]) -> T:
    """Return `parts`, typed so that it can be passed where a rank's method takes one of them."""
    return cast(T, parts)


class AllRanks(Protocol):
    """Calls all ranks of an executor."""

    async def all(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call this method of a face on all ranks at once; return the results, by rank."""


class GeneratorReplica(Protocol):
    """Writes rollouts as one replica."""

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; return once they are queued, not once they are written."""

    async def collect(self, received: int) -> Report:
        """Return the rows that stopped, from number `received` on: those below have arrived, and
        are forgotten. All others are kept, and reported again when the same is asked again.

        If none is kept, this waits until all rollouts of some prompt have stopped, or one was cut,
        but at most for the replica's heartbeat interval: a report without rows only says that it is
        alive. The arrays of a returned row are in storage already.
        """

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each still comes out of `collect`, marked ABORTED."""

    async def renew_environment(self, name: str, calls: Environment) -> None:
        """Send calls to the environment `name` to these `calls` from now on, after a loss."""


class Collector(Protocol):
    """Collects from many replicas for the dispatcher, which gets few messages for all of them."""

    async def collect(self, received: int) -> tuple[int, list[tuple[int, Report | Exception]]]:
        """Return the number of the answer, and what replicas returned: (replica, its report), or
        the exception that its `collect` raised, after which the replica is not asked again. Waits
        for at least one. `received` is the number of the last answer that has arrived (0: none);
        until it has, the same answer is given again, and no replica is told that its report
        arrived."""

    async def follow(self, replica: int, generator: GeneratorReplica) -> None:
        """Collect from this replica too, in place of one that had its number."""


class Checkpointed(Protocol):
    """Has a state that checkpoints hold."""

    async def snapshot(self) -> bool:
        """Copy the state to host memory, to be written while training goes on. Returns False if
        there is too little memory for that: then it must be saved while nothing changes it."""

    async def save(self, folder: str, from_snapshot: bool = False) -> None:
        """Write this executor's part of a checkpoint into `folder` (the caller commits it): the
        present state, or the last `snapshot`. Only one save may run at a time."""

    async def restore(self, folder: str) -> int:
        """Load a checkpoint that `save` wrote; return the version."""


class Trainer(Checkpointed, Protocol):
    """Updates the policy."""

    async def accumulate(self, batch: Batch) -> None:
        """Fetch the rows, run forward and backward, add to the gradients of the current step."""

    async def store_proximal(self, batch: Batch) -> None:
        """Fetch the rows and store their log-probs under the present version: the proximal ones."""

    async def step(self) -> StepStats:
        """Scale the summed gradients once, clip, update; the version grows by one."""

    async def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout."""

    async def infer(self, row_ids: list[int]) -> list[float]:
        """Return, for each stored row, the largest |log pi - log mu| over the tokens that the model
        wrote, under the present version. Changes nothing."""


class Processor(Protocol):
    """Runs a stage between generate and settle: a scorer, a frozen model, a recipe's own code."""

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        """Read the stage's columns of these rollouts, compute, write its columns.

        Returns the results that the controller needs: none, or one per rollout. UserCodeError if
        too many of the recipe's own calls fail.
        """


class Environment(Protocol):
    """Takes turns with rollouts: tools and environments. Generators ask it, not the controller."""

    async def answer(self, turn: TurnItem) -> TurnResult:
        """Begin an episode, or answer a turn of the model in one; calls overlap. An episode that is
        not known, in this attempt, is LOST; one that fails has failed for good."""

    async def progress(self, turns: list[TurnItem]) -> None:
        """Take pieces of turns that stream, while the model goes on with them."""

    async def forget(self, row_ids: Sequence[int]) -> None:
        """Drop these episodes, which do not go on."""


class ColumnStore(Protocol):
    """Reads and writes the arrays of rollouts: the part of storage that executors use."""

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        """Write whole cells; overwriting a cell is allowed only for a partial rollout.

        `writer` signs the cells of an executor that others may take the place of; what it writes
        after it was fenced is skipped.
        """

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """Return the named columns of these rows, in order. KeyError if a cell was never
        written."""


class Storage(ColumnStore, Protocol):
    """Holds the arrays of rollouts."""

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        """Return the rows among these that a generator has written, as it reports them when they
        stop."""

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows with their outcome (trained at which version, dropped and why, ...)
        and free them. Rows that were lost may be written again."""

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        """Free these cells, if there are any; they may be written again."""

    async def fence(self, writer: str) -> None:
        """Take nothing more from this writer: once this returns, none of its bytes gets into a row,
        not even from a write that is under way. ValueError for a writer without a name."""

    async def usage(self) -> dict[str, int]:
        """Return how much is held: `num_rows`, `memory_bytes`, `spilled_bytes`; and `is_full`, not
        0 while no more rows should come."""


class RunObserver:
    """Follows a run, which goes the same way whatever the observer does. This one logs nothing."""

    def log_group(self, group: Group, verdict: Verdict) -> None:
        """Log that `group` is scored, and will be trained on or not."""

    def log_publish(self, seconds: float) -> None:
        """Log that a version is active on the generators, `seconds` after its publish began."""

    def log_evaluation(self, evaluated: Evaluation | None) -> None:
        """Log a held-out evaluation that is finished; None if generators were lost with it."""

    def log_held_out(self, version: int, loss: float, num_tokens: int) -> None:
        """Log the mean loss of `version` over `num_tokens` tokens of the held-out
        demonstrations."""

    async def log_step(
        self,
        stats: StepStats,
        groups: Sequence[Group],
        oldest_version: int,
        found: dict[str, float],
    ) -> None:
        """Log the optimizer step that made `stats.version` from `groups`, once it has ended. Tokens
        older than `oldest_version` had no weight in it. `found` are the figures of the log-prob
        check and of the step's parts."""


class Offloadable(Protocol):
    """An executor whose memory leaves the device while another executor uses that.

    `tags` name memory: a trainer has "weights" and "state" (gradients and optimizer state), a
    generator "weights" and "kv".
    """

    async def offload(self, tags: list[str]) -> None:
        """Move these off the device; a generator first stops decoding at a step boundary.

        Memory that is off the device already stays there.
        """

    async def prefetch(self, tags: list[str]) -> None:
        """Start reading these into the page cache; return at once."""

    async def onload(self, tags: list[str]) -> None:
        """Bring these back bit for bit, at the same addresses where anything refers to them; a
        generator with all its memory back goes on decoding."""
