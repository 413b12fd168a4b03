"""Log-prob checks: does a generator really write with the policy that was published to it?

Fingerprints see the memory that was written. A replica may still decode with something else: stale
views, a wrong scale of quantised weights, or weights changed after the commit. Then the log-probs
of its rollouts differ from the trainer's.

A row is compared only if all its tokens were written by the version that the trainer holds; no
stage waits for one."""

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from llamarl.controller.engines import Engines
from llamarl.core.config import Config
from llamarl.core.config.generator import pool_at
from llamarl.core.errors import RepeatedWarnings, mark_seen
from llamarl.core.groups import Group
from llamarl.core.records import Outcome, Prompt, Purpose, Request, RolloutInfo, Sampling
from llamarl.prompts.stream import rollout_seed

NUM_TOKENS = 8
NUM_ASKED = 16  # replicas per version: the trainer reads all their rows on every rank
NUM_START_ROWS = 16  # of a replica, after its first publish: they show what is normal

# Two float32 programs that sum in different orders differ by about 1e-5 in a log-prob, so there one
# row above the floor is proof. Coarser rounding (bfloat16, int8, fp8) has a long tail: the largest
# difference of a row is 0.01 to 0.04 in the middle, but seven times that in every tenth and 30 to
# 80 times that in one of 100; and all of it grows, slowly, as training sharpens the policy. So
# there the measure is the median of the latest rows, and NUM_PROOFS successive rows of one replica
# are proof. Rows of scaled, permuted or missing weights mostly exceed FACTOR times the median.
FLOAT32_DIFFERENCE = 1e-4
FLOOR = 1e-3
FACTOR = 32.0
NUM_PROOFS = 5
NUM_LATEST = 64
# Half of the rows of another policy differ by several nats; no rounding does that.
LARGEST_MEDIAN = 1.0
LARGEST_FLOAT32_MEDIAN = 0.05  # else an engine computes something else than the trainer

log = logging.getLogger(__name__)


class Tolerance:
    """The largest difference between a generator's and the trainer's log-probs that is normal in
    this run.

    Example: with start rows around 0.02 the tolerance is 0.64; when half of the latest 64 are 0.04
    or more it has become 1.28. Where all start rows are as close as float32's, it is FLOOR for
    good.

    A median of the latest rows above `largest_median` is no rounding.
    """

    def __init__(self, largest_median: float = LARGEST_MEDIAN) -> None:
        self._largest_median = largest_median
        self.value: float | None = None
        """None until one replica's start rows are known."""
        self._start: dict[int, list[float]] = {}  # by replica
        self._latest: deque[float] = deque(maxlen=NUM_LATEST)
        self._num_above: Counter[int] = Counter()  # rows running, by replica
        self._is_sharp = False

    def find_excess(self, replica: int, difference: float) -> float | None:
        """Count the next row of `replica`. If it proves, with those before it, that the replica has
        another policy, return the tolerance that it exceeds; else None."""
        if not math.isfinite(difference):
            return self.value or self._largest_median
        if self.value is None:
            return self._learn(self._start.setdefault(replica, []), difference)
        tolerance = self.value
        num_above = self._num_above[replica] + 1 if difference > tolerance else 0
        self._num_above[replica] = num_above
        self._renew([difference])
        if num_above >= (1 if self._is_sharp else NUM_PROOFS):
            return tolerance
        return self._excess_of_middle()

    def _learn(self, start: list[float], difference: float) -> float | None:
        """Learn from a start row; the first replica with enough rows sets the tolerance for all."""
        start.append(difference)
        if len(start) < NUM_START_ROWS:
            return None
        self._is_sharp = max(start) <= FLOAT32_DIFFERENCE
        self._renew(start)
        return self._excess_of_middle()

    def _renew(self, rows: list[float]) -> None:
        self._latest += rows
        self.value = FLOOR if self._is_sharp else max(FLOOR, FACTOR * median(self._latest))

    def _excess_of_middle(self) -> float | None:
        largest = self._largest_median
        return largest if median(self._latest) > largest else None


@dataclass(kw_only=True)
class LogprobCheck:
    """Asks each replica for a rollout after its commit, and compares those that have arrived.

    The publisher calls `committed` after the dispatcher's. `sampling` is that of training: at
    another temperature, or from a cut distribution, log-probs would differ. By
    weights.logprob_check a replica that writes with another policy ends the run (fail) or is warned
    of (warn); off asks for no rollout. Replicas of one pool round alike.
    """

    engines: Engines
    config: Config
    prompts: Sequence[Prompt]
    sampling: Sampling
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    """The tolerance of |log pi - log mu| by pool, since a difference that is normal in int8 is not
    in float32."""
    _num_asked: int = 0
    _warnings: RepeatedWarnings = field(default_factory=lambda: RepeatedWarnings(log))
    _started: set[int] = field(default_factory=set)
    _asked: dict[asyncio.Task[None], Group] = field(default_factory=dict)

    @property
    def _mode(self) -> str:
        return self.config.weights.logprob_check

    def committed(self, replica: int, version: int) -> None:
        """Ask `replica`, which has committed `version`, for a check rollout, or for several the
        first time."""
        if self._mode == "off":
            return
        dispatch = self.engines.dispatch
        num_shares = math.ceil(len(dispatch.replicas) / NUM_ASKED) or 1
        if replica % num_shares != version % num_shares:
            return  # it is asked at another version
        sampling = replace(self.sampling, max_tokens=min(NUM_TOKENS, self.sampling.max_tokens))
        is_first = replica not in self._started
        self._started.add(replica)
        unit = dispatch.balance.unit_near(replica)
        for row_id in self.engines.gate.allocate_rows(NUM_START_ROWS if is_first else 1, unit):
            prompt = self.prompts[self._num_asked % len(self.prompts)]
            self._num_asked += 1
            group = Group(group_id=-1, prompt=prompt, row_ids=(row_id,), min_version=version)
            request = Request(
                row_id=row_id,
                prompt_ids=prompt.token_ids,
                sampling=sampling,
                seed=rollout_seed(self.config.seed, prompt, -self._num_asked),  # no training row's
                min_version=version,
                purpose=Purpose.CHECK,
                replica=replica,
            )
            task = asyncio.ensure_future(self.engines.rollouts.write(group, [request]))
            task.add_done_callback(mark_seen)  # `Rollouts.serve` raises its error too
            self._asked[task] = group

    async def arrive(self) -> None:
        """Wait until all rollouts that were asked for have stopped."""
        await asyncio.gather(*self._asked, return_exceptions=True)

    async def check(self, version: int) -> dict[str, float]:
        """Compare the log-prob checks that have arrived with the trainer, which holds `version`.

        Returns scalars: the number `logprob_check_rows` of rows compared, and if there were any the
        largest `logprob_check_difference` and, once it is known, the `logprob_check_tolerance`.
        RuntimeError, or in mode "warn" a warning, if a replica's rows prove that it writes with
        other weights.
        """
        if self._mode == "off":
            return {}
        ended = [task for task in self._asked if task.done()]
        groups = [self._asked.pop(task) for task in ended]
        await asyncio.gather(*ended)  # raises what went wrong first, and asyncio warns of no other
        rows = [rollout for group in groups for rollout in group.rollouts.values()]
        good = [row for row in rows if {span.version for span in row.spans} == {version}]
        good_ids = [row.row_id for row in good]
        differences = await self.engines.compare_logprobs(good_ids) if good else []
        for row, difference in zip(good, differences, strict=True):
            self._compare(row, version, difference)
        scalars = {"logprob_check_rows": float(len(good))}
        if good:
            scalars["logprob_check_difference"] = max(differences)
        known = [each.value for each in self.tolerances.values() if each.value is not None]
        if good and known:
            scalars["logprob_check_tolerance"] = max(known)
        outcome: Outcome = {"outcome": "logprob_check", "version": version}
        await self.engines.rollouts.retire([row.row_id for row in rows], outcome)
        return scalars

    def _tolerance(self, replica: int) -> Tolerance:
        """Return the tolerance of the replica's pool."""
        pool = pool_at(self.config.generator, replica)
        if pool.key not in self.tolerances:
            is_wide = self.config.trainer.compute_dtype == "float32"
            is_exact = is_wide and pool.generator.is_exact
            largest = LARGEST_FLOAT32_MEDIAN if is_exact else LARGEST_MEDIAN
            self.tolerances[pool.key] = Tolerance(largest)
        return self.tolerances[pool.key]

    def _compare(self, row: RolloutInfo, version: int, difference: float) -> None:
        """Raise RuntimeError or warn if this row, after those before it, proves another policy."""
        exceeded = self._tolerance(row.replica).find_excess(row.replica, difference)
        if exceeded is None:
            return
        proof = RuntimeError(
            f"generator {row.replica} must write with version {version}, but log-probs of its "
            f"check rollouts (the last is row {row.row_id}) differ from the trainer's by "
            f"{difference:.2g}, tolerated: {exceeded:.2g} (weights.logprob_check)"
        )
        if self._mode == "fail":
            raise proof
        self._warnings.warn("%s", proof, about=row.replica)
