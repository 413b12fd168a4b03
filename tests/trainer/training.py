"""Shared by the trainer tests: a tiny checkpoint, stored rollouts, a job that trains on them."""

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from llamarl.core.config import PlacementConfig, SamplingConfig, TrainerConfig, WeightsConfig
from llamarl.core.errors import StaleVersion
from llamarl.core.records import REF_LOGPROBS, TRAINER_LOGPROBS
from llamarl.metrics.span import Spans
from llamarl.publish.reshard import plan, split
from llamarl.publish.target import Memory, WeightBuffer
from llamarl.storage.client import Store
from llamarl.trainer.losses.aipo import AIPOConfig
from llamarl.trainer.parallel import gather
from llamarl.trainer.reference import ReferenceWorker
from llamarl.trainer.specs import ReferenceSpec, TrainerSpec
from llamarl.trainer.worker import TrainerWorker
from tests.allocation import resident_bytes
from tests.fakes import WatchedStorage
from tests.trainer.rollouts import TEMPERATURE

WARNINGS: list[str] = []  # of the trainers of this process


class _Kept(logging.Handler):
    def emit(self, record):
        WARNINGS.append(record.getMessage())


logging.getLogger("llamarl.trainer.worker").addHandler(_Kept())


@dataclass
class Job:
    """One life of a trainer: start, restore, train each step's parts, save, export, close."""

    checkpoint: str
    rendezvous: str
    cells: dict
    steps: list  # of lists of batches
    trainer: TrainerConfig
    algorithm: object = field(default_factory=lambda: AIPOConfig(rho=2.0))
    ahead: dict = field(
        default_factory=dict
    )  # by step, the batch whose proximal log-probs it finds
    restore: str | None = None
    save: str | None = None  # before the last step
    export: str | None = None
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    replays_routing: bool = False
    top_k: int = 0


def make_executor(rank, num_ranks, job, storage):
    return TrainerWorker(
        TrainerSpec(
            checkpoint=job.checkpoint,
            rendezvous=job.rendezvous,
            config=replace(job.trainer, num_ranks=num_ranks),
            algorithm=job.algorithm,
            sampling=SamplingConfig(temperature=TEMPERATURE, max_tokens=64, top_k=job.top_k),
            weights=WeightsConfig(),
            placement=job.placement,
            run_dir=str(Path(job.checkpoint).parent),
            num_steps=10,
            seed=0,
            replays_routing=job.replays_routing,
            storage=Store([storage]),
        ),
        rank=rank,
        num_ranks=num_ranks,
        spans=Spans(f"trainer-{rank}", None),
    )


async def started(executor):
    """Starts it; no executor lets attention take cuDNN's kernels."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    await executor.start()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


async def train(rank, num_ranks, job):
    """Runs `job`; every rank returns what it saw, full tensors included."""
    storage = WatchedStorage(cells=job.cells)
    executor = make_executor(rank, num_ranks, job, storage)
    await started(executor)
    WARNINGS.clear()
    seen = {"version": 0, "stats": [], "gradients": []}
    if job.restore:
        seen["version"] = await executor.restore(job.restore)
    parameters = executor.policy_step.policy.parameters
    for number, batches in enumerate(job.steps):
        if job.save and number == len(job.steps) - 1:
            await executor.save(job.save)
        for batch in batches:
            await executor.accumulate(batch)
        if number in job.ahead:
            await executor.store_proximal(job.ahead[number])
        seen["gradients"].append(
            {n: gather(p.grad).numpy().copy() for n, p in parameters.items() if p.grad is not None}
        )
        seen["logprobs"] = {
            row_id: cell[TRAINER_LOGPROBS]
            for row_id, cell in storage.rows.items()
            if TRAINER_LOGPROBS in cell
        }
        seen["stats"].append(await executor.step())
    seen["warnings"] = list(WARNINGS)
    seen["layout"] = await executor.source_layout()
    seen["shards"] = {n: p.detach().to_local().numpy().copy() for n, p in parameters.items()}
    seen["weights"] = {n: gather(p).numpy().copy() for n, p in parameters.items()}
    if job.export:
        await executor.export(job.export, "float32")
    await executor.close()
    return seen


async def infer_within_a_step(rank, num_ranks, job, row_ids):
    """Asks for differences between two parts of a step; what they were and what they changed."""
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    (first, second), *later = job.steps
    await executor.accumulate(first)
    before = _everything(executor)
    differences = [await executor.infer(row_ids) for _ in range(2)]
    after = _everything(executor)
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    await executor.accumulate(second)
    assert await executor.infer(row_ids) == differences[0]
    await executor.step()  # what the pass gathered must not be met again
    differences.append(await executor.infer(row_ids))
    for batches in later:
        for batch in batches:
            await executor.accumulate(batch)
        await executor.step()
    seen = {
        "differences": differences,
        "changed": changed,
        "num_compared": len(before),
        "nothing": await executor.infer([]),
        "shards": flat(executor),
    }
    await executor.close()
    return seen


async def take_turns(rank, num_ranks, job):
    """`job.steps`, the trainer off its device before, between and after them.

    Also by how much the process shrank each time, and what must have left; and the errors of calls
    that came meanwhile.
    """
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    addresses = [p.to_local().data_ptr() for p in executor.policy_step.policy.parameters.values()]
    seen = {"shrunk": [], "left": [], "stats": [], "errors": []}

    async def offload(kinds):
        seen["left"].append(sum(map(_num_bytes, map(executor.policy_step.policy.movable, kinds))))
        before = resident_bytes()
        await executor.offload(kinds)
        await executor.offload(kinds)  # without effect
        seen["shrunk"].append(before - resident_bytes())

    await offload(["state", "weights"])
    for batches in job.steps:
        await executor.prefetch(["weights", "state"])
        await executor.onload(["weights"])
        await executor.onload(["state"])
        await executor.accumulate(batches[0])
        await offload(["state", "weights"])  # gradients included
        for call, arguments in (
            (executor.accumulate, [batches[0]]),
            (executor.step, []),
            (executor.infer, [[0]]),
        ):
            try:
                await call(*arguments)
            except RuntimeError as error:
                seen["errors"].append(type(error).__name__)
        await executor.onload(["weights", "state"])
        for batch in batches[1:]:
            await executor.accumulate(batch)
        await executor.infer([0])
        seen["stats"].append(await executor.step())
        await offload(["state"])
        await offload(["weights"])
    await executor.onload(["weights", "state"])
    seen["shards"] = {
        n: p.detach().to_local().numpy().copy()
        for n, p in executor.policy_step.policy.parameters.items()
    }
    seen["moved"] = addresses != [
        p.to_local().data_ptr() for p in executor.policy_step.policy.parameters.values()
    ]
    await executor.close()
    return seen


def _num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _everything(executor):
    """All that a step depends on: weights, gradients, moments, random numbers, statistics."""
    found = {}
    for kind in ("weights", "state"):
        for number, tensor in enumerate(executor.policy_step.policy.movable(kind)):
            found[f"{kind} {number}"] = tensor.clone()
    return found | {
        "rng": torch.get_rng_state(),
        "loss_metrics": executor.policy_step.passes.loss_metrics.vector(),
    }


async def infer(rank, num_ranks, checkpoint, rendezvous, cells, fields, kind=TrainerConfig):
    """`ref_logprobs` by row that this rank wrote."""
    storage = WatchedStorage(cells=cells)
    executor = ReferenceWorker(
        ReferenceSpec(
            checkpoint=checkpoint,
            column=REF_LOGPROBS,
            rendezvous=rendezvous,
            config=kind(num_ranks=num_ranks, tokens_per_micro_batch=40, **fields),
            sampling=SamplingConfig(temperature=TEMPERATURE),
            storage=Store([storage]),
        ),
        rank=rank,
        num_ranks=num_ranks,
        spans=Spans(f"reference-{rank}", None),
    )
    await started(executor)
    await executor.process([((row_id,), None) for row_id in sorted(cells)])
    await executor.close()
    return {i: cell[REF_LOGPROBS] for i, cell in storage.rows.items() if REF_LOGPROBS in cell}


async def write_beside_steps(rank, num_ranks, job):
    """Writes each version before, during or after the step that replaces it, or while it is away.

    What lay in the weights and what each write left: {"write": array, or the text of its error}.
    """
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    source = await executor.source_layout()
    weight_buffer = _weight_buffer(source)
    copies = plan([source], [weight_buffer.layout()])
    route, _ = split(copies, source="trainer", replica=0, transport="shared_memory")
    await executor.connect_target(0, route.for_rank(source.rank))
    weights, written = [], {}

    async def step(version):
        weights.append(flat(executor))
        await executor.accumulate(job.steps[version][0])
        return await executor.step()

    async def write(version):
        try:
            sums = await executor.write(version, [weight_buffer.prepare(version)])
            assert sums == weight_buffer.verify(version)
            return weight_buffer.staging.numpy().copy()
        except StaleVersion as error:
            return str(error)
        finally:
            weight_buffer.abort(version)

    beside = asyncio.create_task(write(0))
    while not weight_buffer.staging[:99].any():
        await asyncio.sleep(0)
    was_running = not beside.done()
    await step(0)
    written["beside"] = await beside
    await step(1)  # no replica has taken version 1 yet
    written["after"] = await write(1)
    written["present"] = await write(2)
    await step(2)  # version 2 was taken
    written["too late"] = await write(2)
    await executor.offload(["weights"])
    written["away"] = await write(3)
    await executor.onload(["weights"])
    written["back"] = await write(3)
    weights.append(flat(executor))
    await executor.connect_target(0, None)
    weight_buffer.close()
    await executor.close()
    return {"was_running": was_running, "weights": weights, "written": written}


def _weight_buffer(source):
    """A generator's memory for all that a trainer of one rank has."""
    boxes, offset = {}, 0
    for name, layout in source.parameters.items():
        box = replace(layout.boxes[0], buffer="weights", offset=offset)
        boxes[name] = replace(layout, boxes=(box,))
        offset += math.prod(layout.shape)
    memory = Memory(parameters=boxes, num_elements=offset, dtype=torch.float32)
    return WeightBuffer(memory, WeightsConfig(), replica=0, rank=0, run_id="test")


def flat(executor):
    return np.concatenate(
        [
            p.detach().to_local().numpy().ravel()
            for p in executor.policy_step.policy.parameters.values()
        ]
    )
