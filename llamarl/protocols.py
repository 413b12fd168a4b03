"""What the controller may ask of each executor, seen from the caller's side.

Owns: the method names and their meaning. Does not own: how a call travels (`cluster/`) or what
runs behind it (`executors/`). Invariant: at most six methods each, all asynchronous.

One executor may be several ranks. Methods of Generator, Collector, Trainer, Scorer, Reference,
Storage and Offloadable answer once for the whole executor. Sender and Receiver, the two ends of a
weight publish, answer with a list, one entry per rank. A generator is a Receiver, and a Sender too:
it passes on what it received to the other replicas of its host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from llamarl.types import Batch, Columns, Outcome, Prompt, Request, RolloutInfo, Score, StepStats

if TYPE_CHECKING:
    from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle


class Generator(Protocol):
    """Writes rollouts. The dispatcher over all replicas is a Generator too."""

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; returns once they are queued, not once they are written."""

    async def collect(self) -> list[RolloutInfo]:
        """Rows that stopped since the last call, in the order they stopped.

        Waits until all rollouts of some prompt have stopped, or one was cut; but at most the
        replica's heartbeat interval: an empty list means alive and nothing to tell. The arrays of
        a returned row are already in storage.
        """

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each still comes out of `collect`, marked ABORTED."""


class Collector(Protocol):
    """Hears from many replicas for the dispatcher, which then gets few messages for all of them."""

    async def collect(self) -> list[tuple[int, list[RolloutInfo] | Exception]]:
        """What replicas told since the last call: (replica, rows that stopped there), or what its
        `collect` raised; that replica is asked no more. Waits for the first news."""


class Trainer(Protocol):
    """Updates the policy."""

    async def accumulate(self, batch: Batch) -> None:
        """Fetch the rows, run forward and backward, add to the gradients of the current step."""

    async def step(self) -> StepStats:
        """Scale the summed gradients once, clip, update; the version grows by one."""

    async def save(self, folder: str) -> None:
        """Write this executor's part of a checkpoint into `folder` (the caller commits it)."""

    async def restore(self, folder: str) -> int:
        """Load what `save` wrote; returns the version."""

    async def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout."""

    async def infer(self, row_ids: list[int]) -> list[float]:
        """Largest |log pi - log mu| over each stored row's response tokens, under the present
        version; changes nothing."""


class Scorer(Protocol):
    """Runs reward code."""

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        """Read the completions of these (row id, prompt) pairs and score them, in order.

        Raises UserCodeError if too many rewards fail.
        """


class Reference(Protocol):
    """The frozen model that a KL term compares with."""

    async def infer(self, row_ids: list[int]) -> None:
        """Compute `ref_logprobs` of these rows and write the column."""


class Storage(Protocol):
    """Holds the arrays of rollouts."""

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        """Write whole cells; overwriting a cell is allowed only for a partial rollout.

        `attempts` (of a generator's rollouts, `Request.attempt`): a row that was retired as lost
        since its attempt began is passed over, for another replica writes it.
        """

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """The named columns of these rows, in order. KeyError if a cell was never written."""

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows with their fate (trained at which version, or dropped and why), free
        them. The fate "lost" ends an attempt: the rows are written again, under the next one."""


class Offloadable(Protocol):
    """An executor that shares its device with another and leaves it while the other works.

    `kinds` name what is moved: a trainer has "weights" and "state" (gradients and optimizer
    state), a generator "weights" and "kv".
    """

    async def offload(self, tags: list[str]) -> None:
        """Move these kinds off the device; a generator stops decoding at a step boundary first.

        Without effect for a kind that has left already.
        """

    async def prefetch(self, tags: list[str]) -> None:
        """Start bringing these kinds nearer (page cache, pinned memory); returns at once."""

    async def onload(self, tags: list[str]) -> None:
        """Bring these kinds back, bit for bit, at the same addresses where anything refers to
        them; a generator with all kinds back goes on decoding."""


class WeightSource(Protocol):
    """The source of a publish; every method answers once per rank."""

    async def source_layout(self) -> list[RankLayout]:
        """Where each rank keeps its boxes of the parameters."""

    async def connect_target(self, replica: int, route: Route | None) -> list[None]:
        """Keep the route to `replica`: each rank those copies that start at it. None forgets the
        replica and unmaps its memory."""

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        """Write one bucket of `version` into the staging memory of one replica (a handle per rank).

        Returns the fingerprints of what was written, by parameter, for all its ranks together: an
        element that several generator ranks hold counts once for each. Raises StaleVersion if
        `version` is no longer there to be read, TargetLost if the replica cannot be reached.
        """


class WeightTarget(Protocol):
    """One generator replica's side of a publish; every method answers once per rank."""

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
