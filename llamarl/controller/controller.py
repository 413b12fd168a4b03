"""The loop. Read it from top to bottom: that is the order in which a rollout lives.

    admit -> roll out: generate, score, ... -> settle -> train -> advance, publish -> admit

The coroutines share nothing but the gate; an exception in one ends all."""

import asyncio
from dataclasses import dataclass, field

from llamarl.controller.batches import PartSize
from llamarl.controller.colocation import Colocation, Phase
from llamarl.controller.engines import Engines
from llamarl.controller.evaluation import Evaluator
from llamarl.controller.gate import Gate
from llamarl.controller.logprob_check import LogprobCheck
from llamarl.controller.saver import Saver
from llamarl.core.groups import Evaluation, Group


@dataclass(kw_only=True)
class Controller:
    """Drives the executors from the first prompt to the last version."""

    engines: Engines
    gate: Gate
    part_size: PartSize
    logprob_check: LogprobCheck
    evaluator: Evaluator
    colocation: Colocation
    saver: Saver
    _evaluating: list[asyncio.Task[Evaluation | None]] = field(default_factory=list)  # one at most

    async def run(self) -> None:
        """Train to the last step, or until prompts are solved; evaluate, save and export."""
        await self.colocation.begin()
        async with self.colocation.phase(Phase.SYNC):
            await self.engines.sync_weights()  # all start with one policy
        async with self.saver.saving(), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self.engines.serve())
            self._evaluate_if_due(self.engines.version, tasks)
            rolling = tasks.create_task(self._roll_out())
            await self._train(tasks)
            rolling.cancel()
            await asyncio.wait({rolling})
            await self.engines.abort()
            await asyncio.gather(*self._evaluating)
            await self.saver.end_whole()
            serving.cancel()
            await self.engines.retire_rest()
        await self.saver.export()

    async def _roll_out(self) -> None:
        """Start a coroutine for each group that the gate admits."""
        async with asyncio.TaskGroup() as groups:
            while True:
                for group in await self.gate.admit():
                    groups.create_task(self._roll_out_group(group))

    async def _roll_out_group(self, group: Group) -> None:
        await self.engines.roll_out(group)
        await self.saver.whole(self._settle(group))

    async def _settle(self, group: Group) -> None:
        """Set the group's advantages, so that it may be taken; or drop it and free its slot."""
        if (reason := await self.engines.settle(group)) is None:
            return await self.gate.settle(group, group.advantages)
        try:
            await self.gate.drop(group, reason)
        finally:
            await self.engines.retire([group], "dropped", reason=reason, group_id=group.group_id)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Make one optimizer step per mini-batch; its version is published during the next step."""
        publishing: list[asyncio.Task[None]] = []  # one at most
        while not self.saver.has_last:
            async with self.colocation.phase(Phase.TRAIN, self._wait_for_batch):
                if await self._accumulate():
                    found = self.part_size.take_metrics()
                    found |= await self.logprob_check.check(self.engines.version)
                    step = self.engines.optim_step(found=found, made=self.saver.made)
                    await self.saver.start_step(step)  # its end overlaps with the next step
                else:  # the prompts are solved: no further step would be whole
                    self.saver.last = self.engines.version
                if self.saver.is_due():
                    await self.saver.save(tasks)
            with self.gate.spans.span("last_publish", "wait"):
                await asyncio.gather(*publishing)
            if not self.saver.has_last:  # else no step needs more groups
                await self.gate.advance(self.engines.version)
            publishing = [tasks.create_task(self._publish(self.engines.version, tasks))]
        await asyncio.gather(*publishing)

    async def _accumulate(self) -> bool:
        """Train on the parts of a step as they are ready; return False if it stays incomplete."""
        oldest = self.gate.oldest_version(self.engines.version)
        missing, ahead = self.gate.steps.groups_per_step, self.gate.num_ahead
        while most := missing or ahead:
            num_groups, num_tokens = self.part_size.least(most)
            if not (groups := await self.gate.take(num_groups, most, num_tokens)):
                return False
            if missing:
                with self.part_size.timed(groups):
                    await self.engines.forward_backward(groups, oldest)
                missing -= len(groups)
            else:  # the batch's later steps have their proximal log-probs from before the first
                await self.engines.look_ahead(groups)
                ahead -= len(groups)
        return True

    async def _wait_for_batch(self) -> None:
        """Wait until generators can spare their device: evaluations and the batch are written."""
        await asyncio.gather(*self._evaluating)
        await self.gate.wait_for(self.gate.steps.groups_per_step + self.gate.num_ahead)

    async def _publish(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Give `version` to the generators; those that evaluate an older one take it afterwards."""
        if self.evaluator.is_due(version, self.saver.last):
            await asyncio.gather(*self._evaluating)
        async with self.colocation.phase(Phase.SYNC):
            if version > self.engines.published:  # else no step was made: the prompts are solved
                await self.engines.sync_weights(version=version)
            self._evaluate_if_due(version, tasks)

    def _evaluate_if_due(self, version: int, tasks: asyncio.TaskGroup) -> None:
        if self.evaluator.is_due(version, self.saver.last):
            is_last = version == self.saver.last
            evaluating = self.evaluator.evaluate(version, is_last=is_last, whole=self.saver.whole)
            self._evaluating = [tasks.create_task(evaluating)]
