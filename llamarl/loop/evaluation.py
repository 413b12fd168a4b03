"""Held-out evaluation on one fixed version.

Owns: the requests of an evaluation and its result. Does not own: generation, scoring (evaluation
rollouts pass the same stages as training ones) or when to evaluate (`controller.py`). Invariant:
every token of an evaluation was written by the same version, else it raises; there is no result
without all of its prompts; its rows carry `Purpose.EVALUATE` and never reach the trainer.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarl.environments.requests import make_requests
from llamarl.groups import Evaluation, Group
from llamarl.loop.engines import Engines
from llamarl.types import FinishReason, Prompt, Purpose, Request, Sampling, StageResult, StageStatus

log = logging.getLogger(__name__)

Whole = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""Does work that changes a run's state and its records, which are saved before or after it."""


@dataclass(kw_only=True)
class Evaluator:
    """Asks for one rollout per held-out prompt and waits until all are scored.

    `version` is the last one evaluated (-1: none), also before a resume. As many replicas as run
    all prompts at once, `rows_per_replica` each, keep the version meanwhile; of the last version,
    all.
    """

    prompts: list[Prompt]
    sampling: Sampling
    seed: int
    has_turns: bool = False
    engines: Engines
    every_steps: int = 0
    version: int = -1
    rows_per_replica: int = 1

    def __post_init__(self) -> None:
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
        self, version: int, *, is_last: bool = False, whole: Whole = asyncio.shield
    ) -> Evaluation | None:
        """Evaluate `version`, the one published last, and log it.

        None if no generator with this version was left to answer some prompts: those that were
        answered are the short ones, so their accuracy would mislead. The next version is due then.
        The rows are retired by `whole`. RuntimeError if a token has another version or every reward
        failed.
        """
        before, self._begun = self._begun, version
        num_replicas = None if is_last else math.ceil(len(self.prompts) / self.rows_per_replica)
        row_ids = self.engines.gate.allocate_rows(len(self.prompts))
        groups = [
            Group(group_id=-1, prompt=prompt, row_ids=(row_id,), min_version=version)
            for row_id, prompt in zip(row_ids, self.prompts, strict=True)
        ]
        with self.engines.hold(version, num_replicas):
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(self.engines.rollouts.roll_out(group, self._requests(group)))
            result = _result(version, groups)
            if result is None:
                self._begun = before
                await whole(self.engines.retire(groups, "unused"))
            else:
                await whole(self._retire(version, groups))
        self.engines.observer.log_evaluation(result)
        return result

    def _requests(self, group: Group) -> list[Request]:
        asked = make_requests(
            group,
            sampling=self.sampling,
            seed=self.seed,
            segment_tokens=0,
            has_turns=self.has_turns,
        )
        return [replace(request, purpose=Purpose.EVALUATE) for request in asked]

    async def _retire(self, version: int, groups: Sequence[Group]) -> None:
        for correct in (True, False):
            those = [each for each in groups if _score(each).correct is correct]
            await self.engines.retire(those, "evaluated", version=version, correct=int(correct))
        self.version = version


def _score(group: Group) -> StageResult:
    return group.scores[group.row_ids[0]]


def _result(version: int, groups: Sequence[Group]) -> Evaluation | None:
    rows = [rollout for group in groups for rollout in group.rollouts.values()]
    if num_lost := sum(row.finish_reason is FinishReason.ABORTED for row in rows):
        words = (
            "version %d has no held-out accuracy, for generators were lost with %d of the %d "
            "prompts: the next version, if there is one, is evaluated"
        )
        log.warning(words, version, num_lost, len(rows))
        return None
    scores = list(map(_score, groups))
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
        mean_tokens=sum(row.num_generated for row in rows) / len(rows),
        truncated_share=sum(r.finish_reason is FinishReason.LENGTH for r in rows) / len(rows),
        num_prompts=num_prompts,
        num_failed=num_prompts - len(good),
    )
