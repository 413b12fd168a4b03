"""The scorer: completions in storage become rewards.

Owns: reading and decoding completions, the failure rate. Does not own: reward code (the pool's
processes run it) or what a missing reward means for its group (the controller). Invariant: a row
has a REWARD cell exactly if its Score has a reward.
"""

import logging
import time
from collections import Counter, deque
from dataclasses import replace

import numpy as np

from llamarl.data.tokenizer import Tokenizer, load_tokenizer
from llamarl.environments.rewards.pool import Completion, RewardPool
from llamarl.errors import UserCodeError
from llamarl.executors.specs import ScorerSpec
from llamarl.metrics.span import Spans
from llamarl.types import (
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    FinishReason,
    Prompt,
    Score,
    ScoreStatus,
    finish_reason,
)

logger = logging.getLogger(__name__)

RATE_WINDOW = 1000  # rewards over which the failure rate is taken
RATE_MINIMUM = 50  # rewards before it is judged


class ScorerExecutor:
    """Scores finished rollouts with a pool of reward processes. Calls to `score` may overlap."""

    def __init__(self, spec: ScorerSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec = spec
        self._spans = spans
        self._config = spec.config
        self._tokenizer: Tokenizer | None = None
        self._pool = RewardPool(spec.config, spec.task_source)
        self._statuses: deque[ScoreStatus] = deque(maxlen=RATE_WINDOW)
        self._logged_cause = ""
        self._num_calls = 0  # running now
        self._num_scored = 0  # rollouts since the executor was last idle
        self._changed_ns = 0  # when it last became busy or idle

    async def start(self) -> None:
        """Load the tokenizer and start the reward processes; ValueError if either cannot work."""
        self._tokenizer = load_tokenizer(self._spec.tokenizer)
        await self._pool.start()
        self._changed_ns = time.monotonic_ns()

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        """Score these (row id, prompt) pairs, in order, and write REWARD of those that have one.

        Raises UserCodeError if more than `config.max_failure_rate` of the last 1000 rewards failed
        (judged after 50).
        """
        self._begin()
        try:
            completions = await self._read(rollouts)
            scores = await self._pool.score(completions)
            if self._config.on_failure == "zero":
                scores = [s if s.has_reward else replace(s, reward=0.0) for s in scores]
            scored = [score for score in scores if score.has_reward]
            if scored:
                await self._spec.storage.write(
                    [score.row_id for score in scored],
                    {REWARD: [np.array([score.reward]) for score in scored]},
                )
        finally:
            self._end(len(rollouts))
        self._check_failures(scores)
        return scores

    async def close(self) -> None:
        """End the reward processes."""
        self._pool.close()

    async def _read(self, rollouts: list[tuple[int, Prompt]]) -> list[Completion]:
        if self._tokenizer is None:
            raise RuntimeError("a scorer must be started before it scores")
        row_ids = [row_id for row_id, _ in rollouts]
        columns = await self._spec.storage.read(row_ids, [RESPONSE_IDS, SAMPLING])
        pairs = zip(columns[RESPONSE_IDS], columns[SAMPLING], strict=True)
        return [
            Completion(
                row_id=row_id,
                prompt=prompt,
                text=self._tokenizer.decode(response_ids),
                finished=finish_reason(sampling) is FinishReason.STOP,
            )
            for (row_id, prompt), (response_ids, sampling) in zip(rollouts, pairs, strict=True)
        ]

    def _check_failures(self, scores: list[Score]) -> None:
        self._statuses.extend(score.status for score in scores)
        failures = [score for score in scores if score.status is not ScoreStatus.OK]
        num_failed = sum(status is not ScoreStatus.OK for status in self._statuses)
        rate = num_failed / max(1, len(self._statuses))
        for score in failures:
            cause = score.error.splitlines()[-1]
            if cause != self._logged_cause:  # the same one over and over says nothing new
                logger.warning("reward of row %d: %s: %s", score.row_id, score.status, score.error)
                self._logged_cause = cause
        if (
            failures
            and len(self._statuses) >= RATE_MINIMUM
            and rate > self._config.max_failure_rate
        ):
            counts = Counter(self._statuses)
            kinds = ", ".join(
                f"{counts[status]} {status}"
                for status in ScoreStatus
                if status is not ScoreStatus.OK
            )
            raise UserCodeError(
                f"at most {self._config.max_failure_rate:.0%} of rewards may fail "
                f"(reward.max_failure_rate), got {num_failed} of the last {len(self._statuses)} "
                f"({kinds}); the last one:\n{failures[-1].error}"
            )

    def _begin(self) -> None:
        if self._num_calls == 0:
            self._record("rollouts", "wait")
        self._num_calls += 1

    def _end(self, num_rollouts: int) -> None:
        self._num_calls -= 1
        self._num_scored += num_rollouts
        if self._num_calls == 0:
            self._record("score", "busy", rollouts=self._num_scored)
            self._num_scored = 0

    def _record(self, name: str, cat: str, **args: int) -> None:
        """Record the time since the executor last changed between busy and idle."""
        now_ns = time.monotonic_ns()
        self._spans.record(name, self._changed_ns, now_ns, cat, **args)
        self._changed_ns = now_ns
