"""The scorer: completions in storage become rewards.

Owns: reading and decoding completions, and writing the reward and the texts that the archive shows.
Does not own: reward code (the pool's processes run it) or what a missing reward means for its group
(the controller). Invariant: a row has a REWARD cell exactly if its Score has a reward.
"""

from dataclasses import replace

import numpy as np

from llamarl.data.tokenizer import Tokenizer, load_tokenizer
from llamarl.environments.rewards.reward_workers import Completion, RewardPool
from llamarl.executors.failure_rate import FailureRate
from llamarl.executors.specs import ScorerSpec
from llamarl.executors.work_spans import WorkSpans
from llamarl.experience.store import RecordingStore
from llamarl.metrics.span import Spans
from llamarl.types import (
    COMPLETION_TEXT,
    PROMPT_ID,
    PROMPT_TEXT,
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
        """Score these rollouts, in order. Writes REWARD of those that have one, PROMPT_ID of all,
        and the texts of those whose prompts are held-out, or of all.

        Raises UserCodeError if more than `config.max_failure_rate` of the last 1000 rewards failed
        (judged after 50).
        """
        with self._work.working(len(items)):
            completions = await self._read(items)
            scores = await self._pool.score(completions)
            if self._config.on_failure == "zero":
                scores = [s if s.has_reward else replace(s, reward=0.0) for s in scores]
            await self._write(completions, scores)
        self._failures.add(scores)
        return scores

    async def close(self) -> None:
        """End the reward processes."""
        self._pool.close()

    async def _write(self, completions: list[Completion], scores: list[Score]) -> None:
        """What `process` says; in one message, unless some rows have other columns."""
        alike: dict[tuple[str, ...], list[tuple[int, dict[str, np.ndarray]]]] = {}
        for completion, score in zip(completions, scores, strict=True):
            cells = {PROMPT_ID: np.array([float(completion.prompt.prompt_id)])}
            if score.has_reward:
                cells[REWARD] = np.array([score.reward])
            if self._spec.has_text or completion.prompt.is_held_out:
                cells[PROMPT_TEXT] = _utf8(completion.prompt.text)
                cells[COMPLETION_TEXT] = _utf8(completion.text)
            alike.setdefault(tuple(cells), []).append((score.row_id, cells))
        for names, rows in alike.items():
            row_ids = [row_id for row_id, _ in rows]
            await self._storage.write(row_ids, {n: [c[n] for _, c in rows] for n in names})

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


def _utf8(text: str) -> np.ndarray:
    """uint8 [bytes]; half of a surrogate pair, which a prompt file may hold, as a question mark."""
    return np.frombuffer(text.encode(errors="replace"), np.uint8)
