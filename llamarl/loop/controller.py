"""The loop. Read it from top to bottom: that is the order in which a rollout lives.

Owns: the stages and their order. Does not own: how anything is done; every collaborator arrives
built. Invariant: stages share nothing but the gate (who may start, who is next) and the ledger
(what is ready); an exception in any stage ends all of them.

    admit -> generate -> collect -> score, infer -> settle -> train -> advance, publish -> admit
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamarl.config import Config
from llamarl.environments.resumable_prompts import ResumablePrompts
from llamarl.loop.colocation import Colocation
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.ledger import Ledger
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.saver import Saver
from llamarl.metrics.run_logger import RunLogger
from llamarl.metrics.span import Spans
from llamarl.protocols import Generator, Reference, Scorer, Storage, Trainer
from llamarl.types import REF_LOGPROBS, Batch, FinishReason, Group, Kept, Purpose, Request, Verdict
from llamarl.weights.sync.publisher import Publisher


@dataclass(kw_only=True)
class Controller:
    """Drives the executors from the first prompt to the last version."""

    config: Config
    saver: Saver
    prompts: ResumablePrompts
    gate: Gate
    ledger: Ledger
    make_requests: Callable[[Group], list[Request]]
    generator: Generator
    scorer: Scorer
    reference: Reference | None
    filter_group: Callable[[Group], Verdict]
    make_batch: Callable[[Sequence[Group], int, int], Batch]
    trainer: Trainer
    storage: Storage
    publisher: Publisher
    logprob_check: LogprobCheck
    colocation: Colocation
    evaluator: Evaluator | None
    run_logger: RunLogger
    spans: Spans

    async def run(self) -> None:
        """Train until `num_steps`, or until prompts are solved; evaluate, save and export that."""
        await self.colocation.begin()
        async with self.colocation.phase("sync"):
            await self.publisher.publish(self.gate.version)  # everybody starts on one policy
        async with self.saver.saving(), asyncio.TaskGroup() as tasks:
            self._start = tasks.create_task
            self._evaluation = self._start(self._evaluate(self.gate.version))
            admitting = self._start(self._admit_stage())
            stages = (self._collect_stage, self._score_stage, self._infer_stage, self._settle_stage)
            serving = [self._start(stage()) for stage in (*stages, self.publisher.watch)]
            await self._train_stage()
            admitting.cancel()
            await self.generator.abort_requests(self.ledger.rows(Purpose.TRAIN, Purpose.CHECK))
            await self._evaluation
            for stage in serving:
                stage.cancel()
            await self.storage.retire(self.ledger.rows(*Purpose), {"outcome": "unused"})
        await self.saver.export()

    async def _admit_stage(self) -> None:
        """Prompts enter when the trainer is close enough behind."""
        while True:
            with self.spans.span("gate", "wait"):
                groups = await self.gate.admit(self.prompts)
            requests = []
            for group in groups:
                requests += self.ledger.add_group(group, self.make_requests(group))
            await self.generator.submit(requests)

    async def _collect_stage(self) -> None:
        """Collect the rollouts that stopped; cut ones are submitted again, to any replica."""
        while True:
            stopped, cut = [], []
            for row in await self.generator.collect():
                if row.finish_reason is FinishReason.SEGMENT:
                    cut.append(replace(self.ledger.entries[row.row_id].request, resume=True))
                else:
                    stopped.append(row)  # written, or given up
            self.ledger.learn_rows(stopped)
            await self.generator.submit(cut)

    async def _score_stage(self) -> None:
        """Each handful of finished rollouts is scored on its own: a slow reward holds no other."""
        async with asyncio.TaskGroup() as calls:
            while True:
                calls.create_task(self._score(await self.ledger.take("score")))

    async def _score(self, row_ids: list[int]) -> None:
        pairs = [(row_id, self.ledger.entries[row_id].prompt) for row_id in row_ids]
        self.ledger.learn_scores(await self.scorer.score(pairs))

    async def _infer_stage(self) -> None:
        """Log-probs of the frozen model, if the algorithm has a KL term."""
        while self.reference is not None:
            row_ids = await self.ledger.take("infer")
            await self.reference.infer(row_ids)
            self.ledger.mark(row_ids, REF_LOGPROBS)

    async def _settle_stage(self) -> None:
        """A group whose rows are all ready gets its advantages, or is dropped and counted."""
        ready: set[int] = set()
        while True:
            for row_id in await self.ledger.take("settle"):
                group = self.ledger.entries[row_id].group
                assert group is not None
                ready.add(row_id)
                if ready.issuperset(group.row_ids):
                    ready.difference_update(group.row_ids)
                    await self._settle(group)

    async def _settle(self, group: Group) -> None:
        self.run_logger.log_group(group, verdict := self.filter_group(group))
        if isinstance(verdict, Kept):
            return await self.gate.settle(group, verdict.advantages)
        reason = verdict.reason
        retire = self._retire([group], outcome="dropped", reason=reason, group_id=group.group_id)
        await self.saver.drop(group, reason, retire)

    async def _train_stage(self) -> None:
        """One optimizer step per batch; its parts are trained as they become ready."""
        publishing = self._start(asyncio.sleep(0))  # nothing to wait for yet
        closing: asyncio.Future[None] = publishing
        while (version := self.saver.version) < self.saver.last:
            oldest = self.gate.oldest_version(version)
            groups: list[Group] = []
            async with self.colocation.phase("train", self._wait_for_batch):
                while missing := self.config.trainer.groups_per_step - len(groups):
                    with self.spans.span("batch", "wait"):
                        part_size = min(self.config.trainer.groups_per_part or missing, missing)
                        part = await self.gate.take(part_size, missing)
                    if not part:  # the prompts are solved: no further step would be whole
                        self.saver.last = version
                        break
                    await self.trainer.accumulate(self.make_batch(part, version, oldest))
                    groups += part
                else:
                    check = await self.logprob_check.check(version)
                    await closing
                    closing = await self.saver.start_step(self._step(groups, oldest, check))
                if self.saver.is_due():
                    await closing  # a checkpoint never knows of a step that is not written down
                    await self.saver.save()
            await publishing
            if self.saver.version < self.saver.last:  # else no step needs more groups
                await self.gate.advance(self.saver.version)
            publishing = self._start(self._publish(self.saver.version))
        await publishing

    async def _step(self, groups: list[Group], oldest: int, check: dict[str, float]) -> None:
        """Make a version; write it down and let go of its rollouts, while the trainer goes on."""
        stats = await self.trainer.step()  # copies under way go on from a snapshot
        self.saver.made(stats.version)
        await self.run_logger.step(replace(stats, scalars=stats.scalars | check), groups)
        version = stats.version - 1  # the one that was trained
        await self._retire(groups, outcome="trained", version=version, oldest_version=oldest)

    async def _wait_for_batch(self) -> None:
        """Until the generators can spare their device: nothing is evaluated, all is written."""
        await self._evaluation
        await self.gate.wait_for(self.config.trainer.groups_per_step)

    async def _publish(self, version: int) -> None:
        """Give `version` to the generators; those that evaluate an older one take it afterwards."""
        if is_due := self._is_evaluated(version):
            await self._evaluation  # one at a time
        async with self.colocation.phase("sync"):
            if version > self.publisher.version:  # else no step was made: the prompts are solved
                self.run_logger.publish((await self.publisher.publish(version)).seconds)
            if is_due:
                self._evaluation = self._start(self._evaluate(version))

    async def _evaluate(self, version: int) -> None:
        if self.evaluator is not None and self._is_evaluated(version):
            row_ids = self.gate.allocate_rows(len(self.evaluator.prompts))
            num_replicas = None if version == self.saver.last else self.evaluator.num_replicas
            with self.publisher.hold(version, num_replicas):
                self.run_logger.evaluation(await self.evaluator.evaluate(version, row_ids))

    def _is_evaluated(self, version: int) -> bool:
        return self.evaluator is not None and self.evaluator.is_due(version, self.saver.last)

    async def _retire(self, groups: list[Group], **outcome: str | int | float) -> None:
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        await self.storage.retire(row_ids, outcome)
        self.ledger.forget(row_ids)
