"""Held-out evaluation on one fixed version.

Every token of an evaluation was written by the same version, otherwise it raises. There is no
result without all of its prompts. Its rows carry `Purpose.EVALUATE` and never reach the trainer."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llamarl.controller.engines import Engines
from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.groups import Evaluation, Group
from llamarl.core.records import FinishReason, Purpose, Request, Sampling, StageStatus
from llamarl.metrics.held_out import BestVersion, result_of, summed_up
from llamarl.prompts.stream import make_requests
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.rules import evaluation_sampling

log = logging.getLogger(__name__)

Whole = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
"""Does work that changes a run's state and its records, which are saved before or after it."""


@dataclass(kw_only=True)
class Evaluator:
    """Asks for rollouts of each held-out prompt, as `evaluation.*` says, and waits until all are
    scored. The run ends when `best` says so.

    `version` is the last one evaluated (-1: none), also before a resume. During an evaluation as
    many replicas keep the version as run all prompts at once; for the last version all replicas
    keep it.
    """

    engines: Engines
    config: Config
    inputs: Inputs
    version: int = -1
    best: BestVersion = field(default_factory=BestVersion)

    def __post_init__(self) -> None:
        self.prompts, self._evaluation = self.inputs.held_out, self.config.evaluation
        self._begun = self.version
        self._saved = -1  # a version that is saved, though it is not wanted
        self._passed_over: Evaluation | None = None  # the best one if it is saved after all?

    def is_due(self, version: int, last: int) -> bool:
        """Return whether to evaluate `version`: the first and the last one are due, and one every
        `every_steps` (0: none between). No version is due twice, and none without prompts."""
        if not self.prompts or version <= self._begun:
            return False
        every = self._evaluation.every_steps
        has_passed = every > 0 and version // every > self._begun // every
        has_passed = has_passed and (not self.best.metric or self._is_between(version))
        return self._begun < 0 or has_passed or version == last

    def is_wanted(self, version: int) -> bool:
        """Return whether `version` is one of every `every_steps`, and so will be due unless it is
        lost. Where a best version is kept, an evaluation that falls amid a batch is put off to the
        batch's end, since nothing is saved before. The version that a session begins with is saved,
        so it may be the best."""
        first = self.engines.gate.steps.first_version
        if self.prompts and self.best.metric and version == first > 0:
            return True
        every = self._evaluation.every_steps
        if not (self.prompts and every):
            return False
        before = version - 1
        if self.best.metric:
            if not self._is_between(version):
                return False
            before = self.engines.gate.steps.first_of_batch(before)
        return version // every > before // every

    async def measure_before_save(self, version: int, last: int, whole: Whole) -> None:
        """Evaluate the trainer's `version` if that needs no publish: no generator has it yet."""

    def note_saved(self, version: int) -> None:
        """Note that `version` is saved after all, for example as the last one of a run that ends
        early; so it may be the best."""
        self._saved, passed_over = version, self._passed_over
        if passed_over is not None and passed_over.version == version:
            self.best.add(passed_over)
            self._passed_over = None

    def _is_between(self, version: int) -> bool:
        """Return whether `version` is the one before the first step of a batch."""
        return self.engines.gate.steps.first_of_batch(version) == version

    async def evaluate(
        self, version: int, *, is_last: bool = False, whole: Whole = asyncio.shield
    ) -> Evaluation | None:
        """Evaluate `version`, the one published last, and log it.

        Returns None if no generator with this version was left to answer some prompts: those that
        were answered are the short ones, so their accuracy would mislead. The next version is due
        then. The rows are retired by `whole`. RuntimeError if a token has another version or every
        reward failed.
        """
        before, self._begun = self._begun, version
        num_rows = len(self.prompts) * self._evaluation.rollouts_per_prompt
        most = min(pool.generator.max_num_seqs for pool in pools_of(self.config.generator))
        num_replicas = None if is_last else math.ceil(num_rows / most)
        row_ids = self.engines.gate.allocate_rows(num_rows)
        sampling = evaluation_sampling(self.config, self.inputs)
        groups = [
            Group(group_id=-1, prompt=prompt, row_ids=of_prompt, min_version=version)
            for place, prompt in enumerate(self.prompts)
            if (of_prompt := row_ids[place :: len(self.prompts)])
        ]
        with self.engines.hold(version, num_replicas):
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    requests = self._requests(group, sampling)
                    tasks.create_task(self.engines.rollouts.roll_out(group, requests))
            result = self._result(version, groups)
            if result is None:
                self._begun = before
                await whole(self.engines.retire(groups, "unused"))
                self.engines.observer.log_evaluation(None)
            else:
                is_saved = is_last or self.is_wanted(version)
                await whole(self._end(result, groups, is_saved))
        return result

    def _requests(self, group: Group, sampling: Sampling) -> list[Request]:
        asked = make_requests(
            group,
            sampling=sampling,
            seed=self.config.seed,
            segment_tokens=0,
            has_turns=self.inputs.graph.has_episodes,
        )
        return [replace(request, purpose=Purpose.EVALUATE) for request in asked]

    async def _end(self, result: Evaluation, groups: Sequence[Group], is_saved: bool) -> None:
        """Retire the rows and log the result; a saved state holds both or neither. Only a version
        whose checkpoint `is_saved` may be the best."""
        alike: dict[tuple[str, bool], list[Group]] = {}
        for group in groups:
            for row_id in group.row_ids:
                kind = group.prompt.held_out, group.scores[row_id].correct
                alike.setdefault(kind, []).append(replace(group, row_ids=(row_id,)))
        for (name, correct), those in alike.items():
            await self.engines.retire(
                those, "evaluated", version=result.version, correct=int(correct), held_out=name
            )
        self.version = result.version
        self.engines.observer.log_evaluation(result)
        if is_saved or result.version == self._saved:
            self.best.add(result)
        else:
            self._passed_over = result
        if why := self.best.why_over:
            await self.engines.gate.end(why)

    def _result(self, version: int, groups: Sequence[Group]) -> Evaluation | None:
        rows = [row for group in groups for row in group.sequences]
        if num_lost := sum(row.finish_reason is FinishReason.ABORTED for row in rows):
            words = (
                "version %d has no held-out accuracy, for generators were lost with %d of the %d "
                "rollouts: the next version, if there is one, is evaluated"
            )
            log.warning(words, version, num_lost, len(rows))
            return None
        foreign = {span.version for row in rows for span in row.spans} - {version}
        if foreign:
            raise RuntimeError(f"evaluation of version {version} met tokens of {sorted(foreign)}")
        scores = [score for group in groups for score in group.scores.values()]
        if all(score.status is not StageStatus.OK for score in scores):
            raise RuntimeError(f"every reward of the evaluation failed: {scores[0].error}")
        at_k = self._evaluation.ks
        results = [result_of(group, at_k) for group in groups]
        return summed_up(version, results, at_k, [*self._evaluation.sets])
