"""The loop. Read it from top to bottom: that is the order in which a rollout lives.

Owns: the stages and their order. Does not own: how anything is done; every collaborator arrives
built. Invariant: stages share nothing but the gate (who may start, who is next) and the ledger
(what is ready); an exception in any stage ends all of them.

    admit -> generate -> collect -> score, ... -> settle -> train -> advance, publish -> admit

The stages between collect and settle are those of the recipe's graph (`experience/graph.py`).
"""

import asyncio
from dataclasses import dataclass, field, replace

from llamarl.config import Config
from llamarl.experience.graph import SETTLE
from llamarl.loop.collaborators import Roles, Rules, RunObserver
from llamarl.loop.colocation import Colocation, Phase
from llamarl.loop.evaluation import Evaluator
from llamarl.loop.gate import Gate
from llamarl.loop.ledger import Ledger
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.part_size import PartSize
from llamarl.loop.saver import Saver
from llamarl.loop.serving import serve_stage
from llamarl.types import FinishReason, Group, Kept, Outcome, Purpose
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
    part_size: PartSize = field(init=False)
    _evaluating: list[asyncio.Task[None]] = field(default_factory=list)  # one at most

    def __post_init__(self) -> None:
        self.part_size = PartSize(config=self.config.trainer)

    async def run(self) -> None:
        """Train until `num_steps`, or until prompts are solved; evaluate, save and export that."""
        await self.colocation.begin()
        async with self.colocation.phase(Phase.SYNC):
            await self.publisher.publish(self.gate.version)  # all start with one policy
        async with self.saver.saving(), asyncio.TaskGroup() as tasks:
            self._evaluate_if_due(self.gate.version, tasks)
            admitting = tasks.create_task(self._admit_stage())
            own = self._collect_stage(), self._settle_stage()
            pairs = self.roles.stages.items()
            between = (serve_stage(stage, executor, self.ledger) for stage, executor in pairs)
            serving = [tasks.create_task(work) for work in (*own, *between)]
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

    async def _settle_stage(self) -> None:
        """A group that all stages are done with gets its advantages, or is dropped and counted."""
        while True:
            for row_ids in await self.ledger.take(SETTLE):
                group = self.ledger.entries[row_ids[0]].group
                assert group is not None
                await self._settle(group)

    async def _settle(self, group: Group) -> None:
        self.run_logger.log_group(group, verdict := self.rules.filter_group(group))
        if isinstance(verdict, Kept):
            if group.dropped:
                await self.saver.whole(self._leave_out(group))
            return await self.gate.settle(group, verdict.advantages)
        reason = verdict.reason
        retire = self._retire([group], outcome="dropped", reason=reason, group_id=group.group_id)
        await self.saver.drop(group, reason, retire)

    async def _leave_out(self, group: Group) -> None:
        for reason, row_ids in self.ledger.leave_out(group).items():
            dropped: Outcome = {"outcome": "dropped", "reason": reason, "left_out": 1}
            await self.roles.storage.retire(row_ids, dropped | {"group_id": group.group_id})

    async def _train_stage(self, tasks: asyncio.TaskGroup) -> None:
        """One optimizer step per batch; a version is published while the next one is trained."""
        publishing: list[asyncio.Task[None]] = []  # one at most
        while not self.saver.has_last:
            version = self.saver.version
            async with self.colocation.phase(Phase.TRAIN, self._wait_for_batch):
                if groups := await self._accumulate(version):
                    found = self.part_size.take_metrics()
                    found |= await self.logprob_check.check(version)
                    await self.saver.start_step(self._step(groups, self.gate.consumed, found))
                else:  # the prompts are solved: no further step would be whole
                    self.saver.last = version
                if self.saver.is_due():
                    await self.saver.save(tasks)
            with self.gate.spans.span("last_publish", "wait"):
                await asyncio.gather(*publishing)
            if not self.saver.has_last:  # else no step needs more groups
                await self.gate.advance(self.saver.version)
            publishing = [tasks.create_task(self._publish(self.saver.version, tasks))]
        await asyncio.gather(*publishing)

    async def _accumulate(self, version: int) -> list[Group]:
        """Train on the parts of a step as they become ready; [] if it will not be whole."""
        oldest, groups = self.gate.oldest_version(version), list[Group]()
        while missing := self.config.trainer.groups_per_step - len(groups):
            num_groups, num_tokens = self.part_size.least(missing)
            if not (part := await self.gate.take(num_groups, missing, num_tokens)):
                return []
            batch = self.rules.make_batch(part, version, oldest)
            with self.part_size.timed(batch):
                await self.roles.trainer.accumulate(batch)
            groups += part
        return groups

    async def _step(
        self, groups: list[Group], consumed: list[Group], found: dict[str, float]
    ) -> None:
        """Make a version; log it and retire what it consumed, while the trainer goes on."""
        stats = await self.roles.trainer.step()  # copies under way go on from a snapshot
        self.saver.made(stats.version)
        version = stats.version - 1  # the one that was trained
        oldest = self.gate.oldest_version(version)
        await self.run_logger.log_step(stats, groups, oldest, found)
        await self._retire(consumed, outcome="trained", version=version, oldest_version=oldest)

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
            whole = self.saver.whole
            self.run_logger.log_evaluation(await self.evaluator.evaluate(version, row_ids, whole))

    async def _retire(self, groups: list[Group], **outcome: str | int | float) -> None:
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        self.ledger.forget(row_ids)  # first: what is in the ledger when the run ends is unused
        await self.roles.storage.retire(row_ids, outcome)
