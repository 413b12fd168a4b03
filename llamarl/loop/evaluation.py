"""Held-out evaluation on one fixed version.

Owns: the requests of an evaluation and its result. Does not own: generation, scoring (evaluation
rollouts pass the same stages as training ones) or when to evaluate (`controller.py`). Invariant:
every token of an evaluation was written by the same version, else it raises; there is no result
without all of its prompts; its rows carry `Purpose.EVALUATE` and never reach the trainer.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from llamarl.environments.requests import rollout_seed
from llamarl.errors import NoGenerator
from llamarl.experience.graph import Stage
from llamarl.loop.ledger import EVALUATE, Ledger
from llamarl.loop.serving import serve_stage
from llamarl.protocols import Generator, Processor, Storage
from llamarl.types import (
    Evaluation,
    FinishReason,
    Outcome,
    Prompt,
    Purpose,
    Request,
    Sampling,
    StageStatus,
)

log = logging.getLogger(__name__)

Whole = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""Does work that changes a run's state and its records, which are saved before or after it."""


@dataclass(kw_only=True)
class Evaluator:
    """Asks for one rollout per held-out prompt and waits until all are scored.

    `version` is the last one evaluated (-1: none), also before a resume. `num_replicas` are as many
    as run all prompts at once, `rows_per_replica` each.
    """

    prompts: list[Prompt]
    sampling: Sampling
    seed: int
    generator: Generator
    ledger: Ledger
    storage: Storage
    every_steps: int = 0
    version: int = -1
    rows_per_replica: int = 1

    def __post_init__(self) -> None:
        self.num_replicas = math.ceil(len(self.prompts) / self.rows_per_replica)
        self._begun = self.version

    def is_due(self, version: int, last: int) -> bool:
        """Whether to evaluate `version`: the first and the last one are, and one every
        `every_steps` (0: none between), but none twice, and none without prompts."""
        if not self.prompts or version <= self._begun:
            return False
        every = self.every_steps
        has_passed = every > 0 and version // every > self._begun // every
        return self._begun < 0 or has_passed or version == last

    async def evaluate(
        self, version: int, row_ids: tuple[int, ...], whole: Whole = asyncio.shield
    ) -> Evaluation | None:
        """Evaluate `version`, which the caller keeps active; `row_ids` has one entry per prompt.

        None if no generator with this version was left to answer some prompts: those that were
        answered are the short ones, so their accuracy would mislead. The next version is due then.
        The rows are retired by `whole`. RuntimeError if a token has another version or every reward
        failed.
        """
        before, self._begun = self._begun, version
        requests = [
            Request(
                row_id=row_id,
                prompt_ids=prompt.token_ids,
                sampling=self.sampling,
                seed=rollout_seed(self.seed, prompt, 0),
                min_version=version,
                purpose=Purpose.EVALUATE,
            )
            for row_id, prompt in zip(row_ids, self.prompts, strict=True)
        ]
        for request, prompt in zip(requests, self.prompts, strict=True):
            self.ledger.add(request, prompt)
        await self.generator.submit(requests)
        unscored = set(row_ids)
        while unscored:
            for taken in await self.ledger.take(EVALUATE):
                unscored.difference_update(taken)
        result = self._result(version, row_ids)
        if result is None:
            self._begun = before
            await whole(self.storage.retire(list(row_ids), {"outcome": "unused"}))
        else:
            await whole(self._retire(version, row_ids))
        self.ledger.forget(row_ids)
        return result

    async def _retire(self, version: int, row_ids: tuple[int, ...]) -> None:
        for correct in (True, False):
            those = [r for r in row_ids if self._is_correct(r) is correct]
            outcome: Outcome = {"outcome": "evaluated", "version": version, "correct": int(correct)}
            await self.storage.retire(those, outcome)
        self.version = version

    def _is_correct(self, row_id: int) -> bool:
        score = self.ledger.entries[row_id].score
        return score is not None and score.correct

    def _result(self, version: int, row_ids: tuple[int, ...]) -> Evaluation | None:
        entries = [self.ledger.entries[row_id] for row_id in row_ids]
        rows = [entry.rollout for entry in entries if entry.rollout is not None]
        scores = [entry.score for entry in entries if entry.score and entry.rollout]
        if num_lost := len(entries) - len(rows):
            log.warning(
                "version %d has no held-out accuracy, for generators were lost with %d of the %d "
                "prompts: the next version, if there is one, is evaluated",
                version,
                num_lost,
                len(entries),
            )
            return None
        foreign = {span.version for row in rows for span in row.spans} - {version}
        if foreign:
            raise RuntimeError(f"evaluation of version {version} met tokens of {sorted(foreign)}")
        good = [score for score in scores if score.status is StageStatus.OK]
        if not good:
            raise RuntimeError(f"every reward of the evaluation failed: {scores[0].error}")
        num_prompts = len(scores)
        return Evaluation(
            version=version,
            accuracy=sum(score.correct for score in good) / num_prompts,
            reward=sum(score.reward for score in good) / num_prompts,
            mean_tokens=sum(row.num_tokens for row in rows) / len(rows),
            truncated_share=sum(r.finish_reason is FinishReason.LENGTH for r in rows) / len(rows),
            num_prompts=num_prompts,
            num_failed=num_prompts - len(good),
        )


async def evaluate_alone(evaluator: Evaluator, score: Stage, scorer: Processor) -> Evaluation:
    """Evaluate version 0 without a loop around: collect and score nothing but these rollouts."""
    ledger = evaluator.ledger

    async def collect() -> None:
        while True:
            ledger.learn_rollouts(await evaluator.generator.collect())

    async with asyncio.TaskGroup() as tasks:
        own = collect(), serve_stage(score, scorer, ledger)
        serving = [tasks.create_task(work) for work in own]
        result = await evaluator.evaluate(0, tuple(range(len(evaluator.prompts))))
        for task in serving:
            task.cancel()
    if result is None:
        raise NoGenerator("every generator replica is lost")
    return result
