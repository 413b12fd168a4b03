"""Canaries: does a generator really write with the policy that was published to it?

Owns: one short rollout per publish and replica (of many replicas: of some in turn), the comparison
of its log-probs with the trainer's, and what difference is tolerated. Does not own: the publish, or
the fingerprints that prove which bytes arrived. Invariant: a row is compared only if all its tokens
were written by the very version that the trainer holds; nobody ever waits for one.

Fingerprints see the memory that was written. A replica may still decode with something else: stale
views, a wrong scale of quantised weights, weights changed after the flip. That shows here, in what
it writes.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from llamarl.data.seeds import rollout_seed
from llamarl.dispatch import Dispatch
from llamarl.experience.ledger import Ledger
from llamarl.protocols import Storage, Trainer
from llamarl.types import Fate, Prompt, Purpose, Request, Row, Sampling

NUM_TOKENS = 8
NUM_ASKED = 16  # replicas per version, in turns: the trainer reads all their rows on every rank
NUM_START_ROWS = 16  # per replica, after its first publish; so many tell what is normal

# Two float32 programs that sum in different orders differ by about 1e-5 in a log-prob, so there one
# row above the floor is proof. Coarser rounding (bfloat16, int8, fp8) has a long tail: the largest
# difference of a row is 0.01 to 0.04 in the middle, but 30 to 80 times that in one row of 100. Of
# rows that are healthy like these, three running exceed FACTOR times the largest of 16 in less than
# one of 100 runs of 2,000 checks; one alone does in every second run. Rows written with scaled,
# permuted or missing weights exceed it mostly.
FLOOR = 1e-3
FACTOR = 8.0
NUM_PROOFS = 3
# The middle row of a policy that is another one differs by several nats; no rounding does that.
LARGEST_MEDIAN = 1.0


class Canary:
    """Asks each replica for a rollout after its flip, and compares those that have arrived.

    `flipped` belongs to the publisher's `on_flip`, after the dispatcher's. `sampling` is that of
    training: at another temperature, or from a cut distribution, log-probs would differ.
    """

    def __init__(
        self,
        *,
        dispatch: Dispatch,
        ledger: Ledger,
        storage: Storage,
        trainer: Trainer,
        allocate_rows: Callable[[int], Sequence[int]],
        prompts: list[Prompt],
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.tolerance: float | None = None
        """Largest |log pi - log mu| that is accepted; None until the start rows are compared."""
        self.num_checked = 0
        self.num_missed = 0
        """Rows of another version than the trainer's when they were looked at."""
        self._dispatch = dispatch
        self._ledger = ledger
        self._storage = storage
        self._trainer = trainer
        self._allocate_rows = allocate_rows
        self._prompts = prompts
        self._sampling = replace(sampling, max_tokens=min(NUM_TOKENS, sampling.max_tokens))
        self._seed = seed
        self._num_asked = 0
        self._start: dict[int, list[float]] = {}  # differences of the first rows, by replica
        self._num_above: Counter[int] = Counter()  # rows running above the tolerance, by replica
        self._started: set[int] = set()
        self._submits: set[asyncio.Task[None]] = set()

    def flipped(self, replica: int, version: int) -> None:
        """Ask `replica`, where `version` is live now, for a canary; for several the first time."""
        num_shares = math.ceil(len(self._dispatch.replicas) / NUM_ASKED) or 1
        if replica % num_shares != version % num_shares:
            return  # its turn is at another version
        is_first = replica not in self._started
        self._started.add(replica)
        requests = []
        for row_id in self._allocate_rows(NUM_START_ROWS if is_first else 1):
            prompt = self._prompts[self._num_asked % len(self._prompts)]
            self._num_asked += 1
            request = Request(
                row_id=row_id,
                prompt_ids=prompt.token_ids,
                sampling=self._sampling,
                seed=rollout_seed(self._seed, prompt, -self._num_asked),  # no training row's
                min_version=version,
                purpose=Purpose.CANARY,
            )
            self._ledger.add(request, prompt)
            requests.append(request)
        self._submits.add(asyncio.ensure_future(self._dispatch.submit_to(replica, requests)))

    async def check(self, version: int) -> dict[str, float]:
        """Compare the canaries that have arrived with the trainer, which holds `version`.

        Returns scalars: `canary_rows` compared, and if there were any the largest
        `canary_difference` and, once it is known, the `canary_tolerance`. The first replica
        with NUM_START_ROWS compared sets it for all: max(FLOOR, FACTOR * largest difference).
        RuntimeError if a replica exceeds it: once where it is the floor, else NUM_PROOFS rows
        running.
        """
        self._look_after_submits()
        rows = self._arrived()
        good = [row for row in rows if {span.version for span in row.spans} == {version}]
        self.num_missed += len(rows) - len(good)
        differences = await self._trainer.infer([row.row_id for row in good]) if good else []
        for row, difference in zip(good, differences, strict=True):
            self._compare(row, version, difference)
        self.num_checked += len(good)
        scalars = {"canary_rows": float(len(good))}
        if good:
            scalars["canary_difference"] = max(differences)
        if good and self.tolerance is not None:
            scalars["canary_tolerance"] = self.tolerance
        fate: Fate = {"fate": "canary", "version": version}
        await self._storage.retire([row.row_id for row in rows], fate)
        self._ledger.forget([row.row_id for row in rows])
        return scalars

    def _look_after_submits(self) -> None:
        """Forget requests that are on their way no more; raise what went wrong with one."""
        done = {task for task in self._submits if task.done()}
        self._submits -= done
        errors = [error for error in (task.exception() for task in done) if error is not None]
        if errors:
            raise errors[0]

    def _arrived(self) -> list[Row]:
        entries = (self._ledger.entries[r] for r in self._ledger.rows(Purpose.CANARY))
        return [entry.row for entry in entries if entry.row is not None]

    def _compare(self, row: Row, version: int, difference: float) -> None:
        """RuntimeError if this row, after those before it, proves another policy."""
        if not math.isfinite(difference):
            raise _proof(row, version, difference, self.tolerance or LARGEST_MEDIAN)
        if self.tolerance is None:
            self._learn(row, version, difference)
            return
        num_above = self._num_above[row.replica] + 1 if difference > self.tolerance else 0
        self._num_above[row.replica] = num_above
        if num_above == (1 if self.tolerance == FLOOR else NUM_PROOFS):
            raise _proof(row, version, difference, self.tolerance)

    def _learn(self, row: Row, version: int, difference: float) -> None:
        """Count a start row; the first replica with enough of them sets the tolerance."""
        start = self._start.setdefault(row.replica, [])
        start.append(difference)
        if len(start) == NUM_START_ROWS:
            if median(start) > LARGEST_MEDIAN:
                raise _proof(row, version, median(start), LARGEST_MEDIAN)
            self.tolerance = max(FLOOR, FACTOR * max(start))


def _proof(row: Row, version: int, difference: float, tolerance: float) -> RuntimeError:
    return RuntimeError(
        f"generator {row.replica} must write with version {version}, but log-probs of its canaries "
        f"(the last is row {row.row_id}) differ from the trainer's by {difference:.2g}, tolerated: "
        f"{tolerance:.2g}"
    )
