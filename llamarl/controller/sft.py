"""Supervised fine-tuning: demonstrations take the place of generators in the loop
(`controller.py`).

They are trained in the order of the prompt stream, so a run that resumes learns what an
uninterrupted run would have learnt."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.controller.engines import Engines
from llamarl.controller.evaluation import Evaluator, Whole
from llamarl.core.batcher import Batcher
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
from llamarl.publish.publisher import PublishStats

WEIGHT = (1.0,)  # its weight, where a group has advantages


@dataclass(kw_only=True)
class DemonstrationEngines(Engines):
    """The verbs of a run without generators: its groups are demonstrations, which are written into
    storage as they are."""

    def __post_init__(self) -> None:
        self._writing = Batcher(self._write, self.rollouts.fail)

    async def connect(self) -> None:
        """Do nothing, since there are no generators to connect."""

    async def serve(self) -> None:
        """Wait for the first error of a write, and raise it."""
        await self.rollouts.until_failed(asyncio.Event().wait())

    async def roll_out(self, group: Group) -> None:
        """Write the demonstration into storage."""
        await self._writing.ask(group)

    async def settle(self, group: Group) -> str | None:
        group.advantages = WEIGHT
        return None

    async def forward_backward(self, groups: Sequence[Group], oldest_version: int = 0) -> None:
        """Give every token weight, whatever `oldest_version` is, since a demonstration has no
        version."""
        await super().forward_backward(groups)

    async def abort(self) -> None:
        """Do nothing, since no generator writes."""

    async def sync_weights(self, *, version: int | None = None) -> PublishStats:
        """Do nothing, since only the trainer has weights."""
        return PublishStats()

    async def close(self) -> None:
        await self._writing.close()
        await super().close()

    async def _write(self, groups: list[Group]) -> None:
        await write_demonstrations(self, groups, Purpose.TRAIN)


@dataclass(kw_only=True)
class HeldOutLoss(Evaluator):
    """Measures the loss of the held-out demonstrations: the mean over the tokens that the assistant
    wrote."""

    async def evaluate(
        self, version: int, *, is_last: bool = False, whole: Whole = asyncio.shield
    ) -> None:
        """Measure the loss with the trainer's version, before the next step."""
        self._begun = version
        row_ids = self.engines.gate.allocate_rows(len(self.prompts))
        groups = [
            Group(
                group_id=-1,
                prompt=prompt,
                row_ids=(i,),
                min_version=0,
                advantages=WEIGHT,
            )
            for i, prompt in zip(row_ids, self.prompts, strict=True)
        ]
        await write_demonstrations(self.engines, groups, Purpose.EVALUATE)
        await self.engines.look_ahead(groups)
        names = [PROXIMAL_LOGPROBS, TOKEN_VERSIONS]
        columns = await self.engines.rollouts.storage.read([*row_ids], names)
        pairs = zip(*(columns[name] for name in names), strict=True)
        found = [logprobs[versions != NO_VERSION] for logprobs, versions in pairs]
        num_tokens = sum(map(len, found))
        loss = -math.fsum(float(np.sum(each, dtype=np.float64)) for each in found) / num_tokens
        await whole(self._retire_measured(version, groups, loss))
        self.engines.observer.log_held_out(version, loss, num_tokens)

    async def measure_before_save(self, version: int, last: int, whole: Whole) -> None:
        """Measure `version` if it is due, so that a run which resumes does not do it again."""
        if self.is_due(version, last):
            await self.evaluate(version, whole=whole)

    async def _retire_measured(self, version: int, groups: Sequence[Group], loss: float) -> None:
        await self.engines.retire(groups, "evaluated", version=version, loss=loss)
        self.version = version


async def write_demonstrations(engines: Engines, groups: Sequence[Group], purpose: Purpose) -> None:
    """Write the demonstrations of these groups, one each, into storage as rollouts of the step that
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
