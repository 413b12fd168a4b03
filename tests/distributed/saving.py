"""Trainers that save: again and again, beside their steps, after a step that broke."""

import asyncio

import torch

from llamarl.core import checkpoint
from llamarl.trainer import worker
from tests.distributed.training import flat, make_executor
from tests.fakes import WatchedStorage


async def save_for_ever(rank, num_ranks, job, run_dir):
    """Commits one checkpoint after another until killed."""
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    for batches in job.steps:
        await executor.accumulate(batches[0])
        stats = await executor.step()
        await checkpoint.save(run_dir, executor, {"version": stats.version}, keep=2)


async def save_beside_a_step(rank, num_ranks, job, folder, available_bytes):
    """Copies version 0, makes version 1, then writes the copy; whether it could be made, and the
    shards before and after."""
    worker.available_bytes = lambda: available_bytes
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    before = flat(executor)
    is_copied = await executor.snapshot()
    await executor.accumulate(job.steps[0][0])
    await executor.step()
    if is_copied:
        writing = asyncio.create_task(executor.save(folder, True))
        await executor.accumulate(job.steps[1][0])
        await executor.step()
        await writing
    seen = is_copied, before, flat(executor)
    await executor.close()
    return seen


async def save_after_a_broken_step(rank, num_ranks, job, folder, breaks_amid_update):
    """What a save says after a step that failed, and whether any weight had changed by then."""
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    update = executor.policy_step.policy.update
    before = [tensor.clone() for tensor in executor.policy_step.policy.movable("weights")]

    def broken_update(lr):
        update(lr)
        raise MemoryError("the optimizer broke")

    if breaks_amid_update:
        executor.policy_step.policy.update = broken_update
    await executor.accumulate(job.steps[0][0])
    if not breaks_amid_update:
        next(iter(executor.policy_step.policy.parameters.values())).grad.fill_(float("nan"))
    failures = []
    for call in (executor.step, lambda: executor.save(folder)):
        try:
            await call()
        except Exception as error:
            failures.append(repr(error))
    after = executor.policy_step.policy.movable("weights")
    has_changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    await executor.close()
    return failures, has_changed
