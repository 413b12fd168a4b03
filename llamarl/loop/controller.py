"""The loop. Read it from top to bottom: that is the order in which a rollout lives.

Owns: the stages and their order. Does not own: how anything is done; every collaborator arrives
built. Invariant: stages share nothing but the gate (who may start, who is next) and the ledger
(what is ready); an exception in any stage ends all of them.

    admit -> generate -> collect -> score, infer -> settle -> train -> advance, publish -> admit
"""

import asyncio
from dataclasses import dataclass, field, replace

from llamarl.config import Config
from llamarl.loop.collaborators import Roles, Rules, RunObserver
from llamarl.loop.colocation import Colocation, Phase
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.ledger import Ledger
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.saver import Saver
from llamarl.types import REF_LOGPROBS, FinishReason, Group, Kept, Purpose
from llamarl.weights.sync.publisher import Publisher


@dataclass(kw_only=True)
class Controller:
    """Drives the executors from the first prompt to the last version."""

    config: Config
    roles: Roles
    rules: Rules
    gate: Gate
    ledger: Ledger
    publisher: Publisher
    logprob_check: LogprobCheck
    colocation: Colocation
    evaluator: Evaluator
    saver: Saver
    run_logger: RunObserver
    _evaluating: list[asyncio.Task[None]] = field(default_factory=list)  # one at most

    async def run(self) -> None:
        """Train until `num_steps`, or until prompts are solved; evaluate, save and export that."""
        await self.colocation.begin()
        async with self.colocation.phase(Phase.SYNC):
            await self.publisher.publish(self.gate.version)  # all start with one policy
        async with self.saver.saving(), asyncio.TaskGroup() as tasks:
            self._evaluate_if_due(self.gate.version, tasks)
            admitting = tasks.create_task(self._admit_stage())
            stages = (self._collect_stage, self._score_stage, self._infer_stage, self._settle_stage)
            serving = [tasks.create_task(stage()) for stage in (*stages, self.publisher.watch)]
            await self._train_stage(tasks)
            admitting.cancel()
            running = self.ledger.rows(Purpose.TRAIN, Purpose.CHECK)
            await self.roles.generator.abort_requests(running)
            await asyncio.gather(*self._evaluating)
            for stage in serving:
                stage.cancel()
            await self.roles.storage.retire(self.ledger.rows(*Purpose), {"outcome": "unused"})
        await self.saver.export()

    async def _admit_stage(self) -> None:
        """Prompts enter when the trainer is close enough behind."""
        while True:
            requests = []
            for group in await self.gate.admit():
                for request in self.rules.make_requests(group):
                    self.ledger.add(request, group.prompt, group)
                    requests.append(request)
            await self.roles.generator.submit(requests)

    async def _collect_stage(self) -> None:
        """Collect the rollouts that stopped; cut ones are submitted again, to any replica."""
        while True:
            stopped, cut = [], []
            for row in await self.roles.generator.collect():
                if row.finish_reason is FinishReason.SEGMENT:
                    cut.append(replace(self.ledger.entries[row.row_id].request, resume=True))
                else:
                    stopped.append(row)  # written, or given up
            self.ledger.learn_rollouts(stopped)
            await self.roles.generator.submit(cut)

    async def _score_stage(self) -> None:
        """Each handful of finished rollouts is scored on its own: a slow reward holds no other."""
        async with asyncio.TaskGroup() as calls:
            while True:
                calls.create_task(self._score(await self.ledger.take("score")))

    async def _score(self, row_ids: list[int]) -> None:
        pairs = [(row_id, self.ledger.entries[row_id].prompt) for row_id in row_ids]
        self.ledger.learn_scores(await self.roles.scorer.score(pairs))

    async def _infer_stage(self) -> None:
        """Log-probs of the frozen model, if the algorithm has a KL term."""
        while self.roles.reference is not None:
            row_ids = await self.ledger.take("infer")
            await self.roles.reference.infer(row_ids)
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
        self.run_logger.log_group(group, verdict := self.rules.filter_group(group))
        if isinstance(verdict, Kept):
            return await self.gate.settle(group, verdict.advantages)
        reason = verdict.reason
        retire = self._retire([group], outcome="dropped", reason=reason, group_id=group.group_id)
        await self.saver.drop(group, reason, retire)

    async def _train_stage(self, tasks: asyncio.TaskGroup) -> None:
        """One optimizer step per batch; a version is published while the next one is trained."""
        publishing: list[asyncio.Task[None]] = []  # one at most
        while not self.saver.has_last:
            version = self.saver.version
            async with self.colocation.phase(Phase.TRAIN, self._wait_for_batch):
                if groups := await self._accumulate(version):
                    check = await self.logprob_check.check(version)
                    await self.saver.start_step(self._step(groups, check))
                else:  # the prompts are solved: no further step would be whole
                    self.saver.last = version
                if self.saver.is_due():
                    await self.saver.save()
            await asyncio.gather(*publishing)
            if not self.saver.has_last:  # else no step needs more groups
                await self.gate.advance(self.saver.version)
            publishing = [tasks.create_task(self._publish(self.saver.version, tasks))]
        await asyncio.gather(*publishing)

    async def _accumulate(self, version: int) -> list[Group]:
        """Train on the parts of a step as they become ready; [] if it will not be whole."""
        oldest, groups = self.gate.oldest_version(version), list[Group]()
        while missing := self.config.trainer.groups_per_step - len(groups):
            part_size = min(self.config.trainer.groups_per_part or missing, missing)
            if not (part := await self.gate.take(part_size, missing)):
                return []
            await self.roles.trainer.accumulate(self.rules.make_batch(part, version, oldest))
            groups += part
        return groups

    async def _step(self, groups: list[Group], check: dict[str, float]) -> None:
        """Make a version; log it and retire its rollouts, while the trainer goes on."""
        stats = await self.roles.trainer.step()  # copies under way go on from a snapshot
        self.saver.made(stats.version)
        version = stats.version - 1  # the one that was trained
        oldest = self.gate.oldest_version(version)
        await self.run_logger.log_step(stats, groups, oldest, check)
        await self._retire(groups, outcome="trained", version=version, oldest_version=oldest)

    async def _wait_for_batch(self) -> None:
        """Until the generators can spare their device: nothing is evaluated, all is written."""
        await asyncio.gather(*self._evaluating)
        await self.gate.wait_for(self.config.trainer.groups_per_step)

    async def _publish(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Give `version` to the generators; those that evaluate an older one take it afterwards."""
        if self.evaluator.is_due(version, self.saver.last):
            await asyncio.gather(*self._evaluating)
        async with self.colocation.phase(Phase.SYNC):
            if version > self.publisher.version:  # else no step was made: the prompts are solved
                self.run_logger.log_publish((await self.publisher.publish(version)).seconds)
            self._evaluate_if_due(version, tasks)

    def _evaluate_if_due(self, version: int, tasks: asyncio.TaskGroup) -> None:
        if self.evaluator.is_due(version, self.saver.last):
            self._evaluating = [tasks.create_task(self._evaluate(version))]

    async def _evaluate(self, version: int) -> None:
        row_ids = self.gate.allocate_rows(len(self.evaluator.prompts))
        num_replicas = None if version == self.saver.last else self.evaluator.num_replicas
        with self.publisher.hold(version, num_replicas):
            self.run_logger.log_evaluation(await self.evaluator.evaluate(version, row_ids))

    async def _retire(self, groups: list[Group], **outcome: str | int | float) -> None:
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        await self.roles.storage.retire(row_ids, outcome)
        self.ledger.forget(row_ids)
