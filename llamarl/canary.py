"""Canaries: does a generator really write with the policy that was published to it?

Owns: one short rollout per replica and publish, the comparison of its log-probs with the trainer's,
and what difference is tolerated. Does not own: the publish, or the fingerprints that prove which
bytes arrived. Invariant: a row is compared only if all its tokens were written by the very version
that the trainer holds; nobody ever waits for one.

Fingerprints see the memory that was written. A replica may still decode with something else: stale
views, a wrong scale of quantised weights, weights changed after the flip. That shows here, in what
it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from llamarl.data.seeds import rollout_seed
from llamarl.dispatch import Dispatch
from llamarl.experience.ledger import Ledger
from llamarl.protocols import Storage, Trainer
from llamarl.types import Fate, Prompt, Purpose, Request, Row, Sampling

NUM_TOKENS = 8
NUM_START_ROWS = 4  # per replica, after its first publish; so many tell what is normal

# Two float32 programs that sum in different orders differ by about 1e-5 in a log-prob. Where
# rounding is coarser (bfloat16, int8, fp8) the start shows it: a few hundredths, with a tail. The
# largest of a few dozen start tokens lies near two standard deviations of rounding, so FACTOR
# leaves room for what a long run meets; another policy than the trainer's differs by far more.
FLOOR = 1e-3
FACTOR = 8.0
# No rounding makes a token e^4 = 55 times as likely: a start like this is no measure of anything.
LARGEST_START = 4.0


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
        self._start_differences: list[float] = []
        self._started: set[int] = set()
        self._submits: set[asyncio.Task[None]] = set()

    def flipped(self, replica: int, version: int) -> None:
        """Ask `replica`, where `version` is live now, for a canary; for several the first time."""
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
        `canary_difference` and the `canary_tolerance`. RuntimeError if a difference exceeds it. The
        first NUM_START_ROWS rows, of whatever replicas, set the tolerance for all of them:
        max(FLOOR, FACTOR * largest difference).
        """
        self._look_after_submits()
        rows = self._arrived()
        good = [row for row in rows if {span.version for span in row.spans} == {version}]
        self.num_missed += len(rows) - len(good)
        differences = await self._trainer.infer([row.row_id for row in good]) if good else []
        scalars = {"canary_rows": float(len(good))}
        if good:
            self._compare(version, dict(zip(good, differences, strict=True)))
            scalars["canary_difference"] = max(differences)
            scalars["canary_tolerance"] = self.tolerance or LARGEST_START
        fate: Fate = {"fate": "canary", "version": version}
        await self._storage.retire([row.row_id for row in rows], fate)
        self._ledger.forget([row.row_id for row in rows])
        return scalars

    def _look_after_submits(self) -> None:
        """Forget requests that are on their way no more; raise what went wrong with one."""
        done = {task for task in self._submits if task.done()}
        self._submits -= done
        for task in done:
            task.result()

    def _arrived(self) -> list[Row]:
        entries = (self._ledger.entries[r] for r in self._ledger.rows(Purpose.CANARY))
        return [entry.row for entry in entries if entry.row is not None]

    def _compare(self, version: int, differences: dict[Row, float]) -> None:
        self.num_checked += len(differences)
        largest = self.tolerance or LARGEST_START
        for row, difference in differences.items():
            if not difference <= largest:  # NaN is one too
                raise RuntimeError(
                    f"generator {row.replica} must write with version {version}, but log-probs of "
                    f"its canary {row.row_id} differ from the trainer's by {difference:.2g}, "
                    f"tolerated: {largest:.2g}"
                )
        if self.tolerance is None:
            self._start_differences += differences.values()
            if len(self._start_differences) >= NUM_START_ROWS:
                self.tolerance = max(FLOOR, FACTOR * max(self._start_differences))
