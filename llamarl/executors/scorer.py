"""The scorer: completions in storage become rewards.

Owns: reading and decoding completions. Does not own: reward code (the pool's processes run it) or
what a missing reward means for its group (the controller). Invariant: a row has a REWARD cell
exactly if its Score has a reward.
"""

from dataclasses import replace

import numpy as np

from llamarl.data.tokenizer import Tokenizer, load_tokenizer
from llamarl.environments.rewards.pool import Completion, RewardPool
from llamarl.executors.failure_rate import FailureRate
from llamarl.executors.specs import ScorerSpec
from llamarl.executors.work_spans import WorkSpans
from llamarl.experience.store import RecordingStore
from llamarl.metrics.span import Spans
from llamarl.types import (
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    FinishReason,
    Score,
    StageItem,
    finish_reason,
)


class ScorerExecutor:
    """Scores finished rollouts with a pool of reward processes. Calls to `process` may overlap."""

    def __init__(self, spec: ScorerSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec = spec
        self._storage = RecordingStore(spec.storage, spans, spec.attempt)
        self._config = spec.config
        self._tokenizer: Tokenizer | None = None
        self._pool = RewardPool(spec.config, spec.task_source)
        self._work = WorkSpans(spans, "score", "rollouts")
        self._failures = FailureRate(
            spec.config.max_failure_rate,
            one="reward",
            all_of_them="rewards",
            key="reward.max_failure_rate",
        )

    async def start(self) -> None:
        """Load the tokenizer and start the reward processes; ValueError if either cannot work."""
        self._tokenizer = load_tokenizer(self._spec.tokenizer)
        await self._pool.start()
        self._work.start()

    async def process(self, items: list[StageItem]) -> list[Score]:
        """Score these rollouts, in order, and write REWARD of those that have one.

        Raises UserCodeError if more than `config.max_failure_rate` of the last 1000 rewards failed
        (judged after 50).
        """
        with self._work.working(len(items)):
            completions = await self._read(items)
            scores = await self._pool.score(completions)
            if self._config.on_failure == "zero":
                scores = [s if s.has_reward else replace(s, reward=0.0) for s in scores]
            scored = [score for score in scores if score.has_reward]
            if scored:
                await self._storage.write(
                    [score.row_id for score in scored],
                    {REWARD: [np.array([score.reward]) for score in scored]},
                )
        self._failures.add(scores)
        return scores

    async def close(self) -> None:
        """End the reward processes."""
        self._pool.close()

    async def _read(self, items: list[StageItem]) -> list[Completion]:
        if self._tokenizer is None:
            raise RuntimeError("a scorer must be started before it scores")
        row_ids = [row_id for (row_id,), _ in items]
        columns = await self._storage.read(row_ids, [RESPONSE_IDS, SAMPLING])
        pairs = zip(columns[RESPONSE_IDS], columns[SAMPLING], strict=True)
        return [
            Completion(
                row_id=row_id,
                prompt=prompt,
                text=self._tokenizer.decode(response_ids),
                finished=finish_reason(sampling) is FinishReason.STOP,
            )
            for ((row_id,), prompt), (response_ids, sampling) in zip(items, pairs, strict=True)
            if prompt is not None
        ]
