"""Supervised fine-tuning: the loop over demonstrations.

    admit -> write -> train -> advance -> admit


Demonstrations are trained in the order of the prompt stream, so a run that resumes learns what
the other would have."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.controller.engines import Engines
from llamarl.controller.evaluation import Evaluator, Whole
from llamarl.controller.gate import Gate
from llamarl.controller.saver import Saver
from llamarl.core.faces import Storage
from llamarl.core.groups import Group
from llamarl.core.records import (
    NO_VERSION,
    PROXIMAL_LOGPROBS,
    TOKEN_VERSIONS,
    Columns,
    Purpose,
    Request,
    Sampling,
)
from llamarl.prompts.demonstrations import as_row


@dataclass(kw_only=True)
class Imitation:
    """Drives the trainer alone from the first demonstration to the last version."""

    engines: Engines
    gate: Gate
    evaluator: Evaluator
    saver: Saver

    async def run(self) -> None:
        """Train until `num_steps`; measure the held-out loss, save and export."""
        async with self.saver.saving(), asyncio.TaskGroup() as tasks:
            await self._evaluate_if_due()
            writing = tasks.create_task(self._write())
            await self._train(tasks)
            writing.cancel()
            await asyncio.wait({writing})
            await self.saver.end_whole()
            await self.engines.retire_rest()
        await self.saver.export()

    async def _write(self) -> None:
        """Demonstrations of the next step are in storage while the trainer learns from this one."""
        while True:
            await self.saver.whole(self._settle(await self.gate.admit()))

    async def _settle(self, groups: Sequence[Group]) -> None:
        await write_demonstrations(self.engines, groups, Purpose.TRAIN)
        for group in groups:
            await self.gate.settle(group, (1.0,))

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        size = self.gate.groups_per_step
        while not self.saver.has_last:
            if groups := await self.gate.take(size, size):
                await self.engines.forward_backward(groups)
                await self.saver.start_step(self.engines.optim_step(made=self.saver.made))
            else:  # the epochs are over
                self.saver.last = self.engines.version
            await self._evaluate_if_due()
            if self.saver.is_due():
                await self.saver.save(tasks)
            if not self.saver.has_last:
                await self.gate.advance(self.engines.version)

    async def _evaluate_if_due(self) -> None:
        version, last = self.engines.version, self.saver.last
        if self.evaluator.is_due(version, last):
            await self.evaluator.evaluate(version, whole=self.saver.whole)


@dataclass(kw_only=True)
class HeldOutLoss(Evaluator):
    """Measures the loss of the held-out demonstrations: the mean over the tokens that the assistant
    wrote. `log` gets a version, that loss and the number of tokens."""

    storage: Storage
    log: Callable[[int, float, int], None]

    async def evaluate(
        self, version: int, *, is_last: bool = False, whole: Whole = asyncio.shield
    ) -> None:
        """Measure it with the trainer's version, while no step is under way."""
        row_ids = self.engines.gate.allocate_rows(len(self.prompts))
        groups = [
            Group(group_id=-1, prompt=prompt, row_ids=(i,), min_version=0, advantages=(1.0,))
            for i, prompt in zip(row_ids, self.prompts, strict=True)
        ]
        await write_demonstrations(self.engines, groups, Purpose.EVALUATE)
        await self.engines.look_ahead(groups)
        names = [PROXIMAL_LOGPROBS, TOKEN_VERSIONS]
        columns = await self.storage.read([*row_ids], names)
        pairs = zip(*(columns[name] for name in names), strict=True)
        found = [logprobs[versions != NO_VERSION] for logprobs, versions in pairs]
        num_tokens = sum(map(len, found))
        loss = -math.fsum(float(np.sum(each, dtype=np.float64)) for each in found) / num_tokens
        await whole(self._retire_measured(version, groups, loss))
        self.log(version, loss, num_tokens)

    async def _retire_measured(self, version: int, groups: Sequence[Group], loss: float) -> None:
        await self.engines.retire(groups, "evaluated", version=version, loss=loss)
        self.version = self._begun = version


async def write_demonstrations(engines: Engines, groups: Sequence[Group], purpose: Purpose) -> None:
    """Let storage hold the demonstrations of these groups, one each, as rollouts of the step that
    trains them."""
    columns: Columns = {}
    requests = []
    for group in groups:
        (row_id,) = group.row_ids
        group.rollouts[row_id], cells = as_row(group.prompt, row_id, group.step)
        for name, cell in cells.items():
            columns.setdefault(name, []).extend(cell)
        sampling = Sampling(max_tokens=group.rollouts[row_id].num_tokens)
        requests.append(
            Request(row_id=row_id, prompt_ids=(), sampling=sampling, seed=0, purpose=purpose)
        )
    await engines.rollouts.give(requests, columns)
