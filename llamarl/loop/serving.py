"""A stage that takes what is ready for it until it is cancelled.

Owns: the calls to the stage's executor, and when the next one begins. Does not own: what is ready
(`ledger.py`). Invariant: what was taken was the stage's alone, and its results are in the ledger
once the call has ended.
"""

import asyncio

from llamarl.experience.columns import PROMPT_RECORD
from llamarl.experience.graph import External, Stage
from llamarl.loop.ledger import LIMIT, Ledger, Taken
from llamarl.protocols import Processor

OUTSIDE_LIMIT = 1024  # rows of a call to External: they wait for consumers there, not here


async def serve_stage(stage: Stage, executor: Processor, ledger: Ledger) -> None:
    """Each handful of ready rollouts is a call of its own, so that a slow one holds no other.
    A model computes one call at a time: what comes meanwhile makes up the next one."""
    limit = OUTSIDE_LIMIT if isinstance(stage.run, External) else LIMIT
    async with asyncio.TaskGroup() as calls:
        while True:
            taken = await ledger.take(stage.name, limit)
            call = calls.create_task(_process(stage, executor, ledger, taken))
            if stage.is_model:
                await call


async def _process(stage: Stage, executor: Processor, ledger: Ledger, taken: Taken) -> None:
    first = [ledger.entries[row_ids[0]] for row_ids in taken]
    prompts = [entry.prompt if PROMPT_RECORD in stage.reads else None for entry in first]
    results = await executor.process([*zip(taken, prompts, strict=True)])
    ledger.finish(stage.name, [i for row_ids in taken for i in row_ids], results)
