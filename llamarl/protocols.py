"""What the controller may ask of each executor, seen from the caller's side.

Owns: the method names and their meaning. Does not own: how a call travels (`cluster/`) or what
runs behind it (`executors/`). Invariant: at most six methods each, all asynchronous.

An executor may have several ranks. The methods of WeightSource and WeightTarget return a list with
one entry per rank, all others one result for the whole executor. A trainer is a WeightSource; a
generator is a WeightTarget and a WeightSource, for it passes weights on to other replicas of its
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from llamarl.types import (
    Batch,
    Columns,
    Outcome,
    Request,
    RolloutInfo,
    StageItem,
    StageResult,
    StepStats,
)

if TYPE_CHECKING:
    from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle


class Generator(Protocol):
    """Writes rollouts. The dispatcher over all replicas is a Generator too."""

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; returns once they are queued, not once they are written."""

    async def collect(self) -> list[RolloutInfo]:
        """Rows that stopped since the last call, in the order they stopped.

        Waits until all rollouts of some prompt have stopped, or one was cut, but at most for the
        replica's heartbeat interval: an empty list only says that it is alive. The arrays of a
        returned row are in storage already.
        """

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each still comes out of `collect`, marked ABORTED."""


class Resettable(Protocol):
    """A generator that outlives a session of its run."""

    async def reset(self) -> None:
        """Forget every rollout, version and route: nothing starts before the next commit. Returns
        once no call to storage or trainer is under way; raises if that takes too long."""

    async def use(self, storage: Storage) -> None:
        """Write to `storage` from now on, in the next session."""


class Collector(Protocol):
    """Collects from many replicas for the dispatcher, which gets few messages for all of them."""

    async def collect(self) -> list[tuple[int, list[RolloutInfo] | Exception]]:
        """What replicas returned since the last call: (replica, rows that stopped there), or the
        exception that its `collect` raised, after which the replica is not asked again. Waits for
        at least one."""

    async def follow(self, replica: int, generator: Generator) -> None:
        """Collect from this replica too, which may have the number of one that was lost."""


class Checkpointed(Protocol):
    """Has a state that checkpoints hold."""

    async def snapshot(self) -> bool:
        """Copy the state to host memory, to be written while training goes on. False if there is
        too little memory for that: then it must be saved while nothing changes it."""

    async def save(self, folder: str, from_snapshot: bool = False) -> None:
        """Write this executor's part of a checkpoint into `folder` (the caller commits it): the
        present state, or what `snapshot` copied last. One save at a time."""

    async def restore(self, folder: str) -> int:
        """Load what `save` wrote; returns the version."""


class Trainer(Checkpointed, Protocol):
    """Updates the policy."""

    async def accumulate(self, batch: Batch) -> None:
        """Fetch the rows, run forward and backward, add to the gradients of the current step."""

    async def step(self) -> StepStats:
        """Scale the summed gradients once, clip, update; the version grows by one."""

    async def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout."""

    async def infer(self, row_ids: list[int]) -> list[float]:
        """Largest |log pi - log mu| over each stored row's response tokens, under the present
        version. Changes nothing."""


class Processor(Protocol):
    """Runs a stage between generate and settle: a scorer, a frozen model, a recipe's own code."""

    async def process(self, items: list[StageItem]) -> Sequence[StageResult]:
        """Read the stage's columns of these rollouts, compute, write its columns.

        Returns what the controller must know: nothing, or one result per rollout. UserCodeError if
        too many of the recipe's own calls fail.
        """


class Storage(Protocol):
    """Holds the arrays of rollouts."""

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        """Write whole cells; overwriting a cell is allowed only for a partial rollout.

        `attempts` are a generator's `Request.attempt`, or of a stage's executor how
        often it was lost before: a row that was retired as lost, or whose cells were erased, since
        its attempt began is skipped, for another one writes it.
        """

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """The named columns of these rows, in order. KeyError if a cell was never written."""

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        """Those of these rows that a generator has written, as it reports them when they stop."""

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows with their outcome (trained at which version, dropped and why, ...)
        and free them. The outcome "lost" ends an attempt: the next one writes the rows again."""

    async def erase(self, row_ids: list[int], names: list[str], attempt: int) -> None:
        """Free these cells, if there are any, for `attempt` of the stage that writes them: nothing
        that an earlier one still writes there is taken."""

    async def usage(self) -> dict[str, int]:
        """What is held: `num_rows`, `memory_bytes`, `spilled_bytes`; and `is_full`, not 0 while no
        more rows should come."""


class Offloadable(Protocol):
    """An executor whose memory leaves the device while another executor uses that.

    `tags` name memory: a trainer has "weights" and "state" (gradients and optimizer state), a
    generator "weights" and "kv".
    """

    async def offload(self, tags: list[str]) -> None:
        """Move these off the device; a generator first stops decoding at a step boundary.

        Without effect for what is off the device already.
        """

    async def prefetch(self, tags: list[str]) -> None:
        """Start reading these into the page cache; returns at once."""

    async def onload(self, tags: list[str]) -> None:
        """Bring these back bit for bit, at the same addresses where anything refers to them; a
        generator with all its memory back goes on decoding."""


class WeightSource(Protocol):
    """The source of a publish; every method returns one result per rank."""

    async def source_layout(self) -> list[RankLayout]:
        """Where each rank keeps its boxes of the parameters."""

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        """Keep the route to `replica`: each rank those copies that start at it. None forgets the
        replica and unmaps its memory."""

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        """Write one bucket of `version` into the staging memory of one replica (a handle per rank).

        Returns the fingerprints of what was written, by parameter, for all the replica's ranks
        together: an element that several of them hold counts once for each. StaleVersion if
        `version` can no longer be read, TargetLost if the replica cannot be reached.
        """


class WeightTarget(Protocol):
    """A generator replica's side of a publish; every method returns one result per rank."""

    async def target_layout(self) -> list[RankLayout]:
        """Where each rank wants its boxes of the parameters."""

    async def connect_source(self, route: Route) -> list[None]:
        """Keep the route that leads here; it replaces the one before."""

    async def prepare(self, version: int, bucket: int) -> list[StagingHandle]:
        """Open the staging memory for one bucket of `version` and say where it is."""

    async def verify(self, version: int, bucket: int) -> list[dict[str, int]]:
        """Fingerprints of the bucket's parameters in the staging memory: all that the rank holds.

        Waits until what the source wrote has arrived.
        """

    async def commit(self, version: int, bucket: int) -> list[int]:
        """Make the bucket active between two decode steps; returns the number of running rollouts.

        With the last bucket the version is active. Decoding stands still between the first bucket's
        commit and the last one's.
        """

    async def abort(self, version: int) -> list[None]:
        """Forget what was prepared; the active weights stay. If some buckets of the version were
        committed already it raises, and the replica computes nothing any more."""
