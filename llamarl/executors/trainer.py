"""One rank of the trainer.

Owns: the way from a batch of row ids to a new version of this rank's shards, and what of them is
on the device. Does not own: packing, passes, optimizer maths, weight transport.
Invariant: the gradient of a step is the sum over its rows divided once by a number that every rank
knows from metadata, so it depends neither on packing nor on the number of ranks; and the weights
never change while a publish reads them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist

from llamarl.algorithms.loss_metrics import LossMetrics, on_policy_warning, statistics
from llamarl.algorithms.losses import find_loss
from llamarl.algorithms.policy_loss import denominator, is_inert
from llamarl.algorithms.schedule import learning_rate
from llamarl.data.packing import pack
from llamarl.executors.compute import ComputeThread
from llamarl.executors.offload import Offloader
from llamarl.executors.passes import Passes
from llamarl.executors.specs import TrainerSpec
from llamarl.metrics.span import Spans
from llamarl.models.parallelize import make_mesh
from llamarl.models.policy import Policy
from llamarl.models.process_group import compute_device, join, leave, use_device
from llamarl.types import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Batch,
    BatchRow,
    Columns,
    StepStats,
)
from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle
from llamarl.weights.layout.shards import shard_boxes
from llamarl.weights.sync.writer import Writer
from llamarl.weights.transports.shared_memory import this_host

T = TypeVar("T")
log = logging.getLogger(__name__)

SHOWN_ROWS = 8  # row ids named in an error


class TrainerExecutor:
    """One rank of the trainer. Calls are served in order of arrival."""

    def __init__(self, spec: TrainerSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec = spec
        self._rank = rank
        self._num_ranks = num_ranks
        self._data_rank, self._tensor_rank = divmod(rank, spec.config.tensor_parallel)
        self._spans = spans
        self._config = spec.config
        self._columns = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
        if spec.algorithm.kl_coefficient > 0:
            self._columns.append(REF_LOGPROBS)
        self._compute = ComputeThread(f"trainer-{rank}")
        self._resources = ExitStack()  # what `close` gives back, however far `start` came
        self._lock = asyncio.Lock()  # collectives must start in the same order on all ranks
        self._version = 0
        self._rows: list[BatchRow] = []  # of the current step, on all ranks
        self._is_whole = True  # False amid an update
        folder = spec.placement.offload_folder or spec.run_dir
        mode = spec.placement.offload if spec.placement.colocated else "none"
        self._offloader = Offloader(mode, folder, f"trainer-{rank}")
        self._resources.callback(self._offloader.close)
        self._idle_since_ns = time.monotonic_ns()

    async def start(self) -> None:
        """Join the other ranks and load this rank's slices of the checkpoint.

        ValueError if the checkpoint is missing or does not fit.
        """
        await self._compute.run(self._build)
        self._idle_since_ns = time.monotonic_ns()

    async def close(self) -> None:
        """Leave the process group and end the compute thread."""
        await self._compute.run(self._resources.close)
        self._compute.close()

    async def accumulate(self, batch: Batch) -> None:
        """Fetch this rank's rows, add their gradients to the step, store `trainer_logprobs`.

        RuntimeError if the batch is meant for another version or its loss is not finite.
        """
        async with self._lock:
            self._require_presence()
            if batch.version != self._version:
                raise RuntimeError(f"batch for version {batch.version} came at {self._version}")
            micro_batches = self._plan(batch)
            rows = [batch.rows[i] for positions in micro_batches for i in positions]
            row_ids = [row.row_id for row in rows]
            columns = await self._spec.storage.read(row_ids, self._columns)
            _check(rows, columns)
            self._waited("batch", self._idle_since_ns)
            num_tokens = sum(row.num_tokens for row in rows)
            with self._spans.span("accumulate", version=self._version, tokens=num_tokens):
                sizes = [len(positions) for positions in micro_batches]
                logprobs = await self._compute.run(
                    lambda: self._passes.accumulate(self._version, rows, columns, sizes)
                )
            if row_ids and self._tensor_rank == 0:
                await self._spec.storage.write(row_ids, {TRAINER_LOGPROBS: logprobs})
            self._rows += batch.rows
            self._idle_since_ns = time.monotonic_ns()

    async def step(self) -> StepStats:
        """Divide the summed gradients, clip, update; writes of this version go on from a snapshot.

        RuntimeError without a batch or if the gradient is not finite.
        """
        async with self._lock:
            self._require_presence()
            if not self._rows:
                raise RuntimeError("step must follow accumulate, got no batch")
            stats = await self._compute.run(self._update)
            self._rows, self._passes.loss_metrics = [], LossMetrics()
            self._idle_since_ns = time.monotonic_ns()
            return stats

    async def save(self, folder: str) -> None:
        """Write this rank's shards, moments and the version into `folder`, which exists.

        RuntimeError after a step that broke amid its update: some weights may be of either version.
        """
        async with self._lock:
            if not self._is_whole:
                raise RuntimeError(f"the step to version {self._version} broke amid its update")
            await self._aside("save", lambda: self.policy.save(folder, self._version))

    async def restore(self, folder: str) -> int:
        """Continue from `folder`, saved under any number of ranks; returns the version."""
        async with self._lock:
            return await self._aside("restore", lambda: self._restore(folder))

    async def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout."""
        async with self._lock:
            await self._aside("export", lambda: self.policy.export(folder, dtype))

    async def source_layout(self) -> RankLayout:
        """Where this rank keeps its boxes of the parameters."""
        return self._writer.layout()

    async def connect_target(self, replica: int, route: Route | None) -> None:
        """Remember the copies of `route` that lead from this rank to `replica`; see Sender."""
        await asyncio.to_thread(self._writer.connect, replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> dict[str, int]:
        """Write `version` into the offered memory beside the compute thread; see Sender.write.

        StaleVersion if the weights are of another version or off the device.
        """
        with self._spans.span("write", "publish", version=version):
            return await asyncio.to_thread(self._writer.write, version, handles)

    async def infer(self, row_ids: list[int]) -> list[float]:
        """Largest |log pi - log mu| over each stored row's response; the same on all ranks.

        Every rank needs the lengths of all rows, to know what the others run, so it reads them all:
        it is meant for a few short rows.
        """
        if not row_ids:
            return []
        async with self._lock:
            names = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS]
            columns = await self._spec.storage.read(row_ids, names)
            return await self._aside("infer", lambda: self._infer(columns))

    async def offload(self, tags: list[str]) -> None:
        """Move "weights" or "state" off the device, once no write reads them; see Offloadable."""
        async with self._lock:
            for tag in tags:
                await self._move("offload", tag, self._offload)

    async def prefetch(self, tags: list[str]) -> None:
        """Start reading what has left."""
        for tag in tags:
            self._offloader.prefetch(tag)

    async def onload(self, tags: list[str]) -> None:
        """Bring these kinds back."""
        async with self._lock:
            for tag in tags:
                await self._move("onload", tag, self._onload)

    def _build(self) -> None:
        token_loss = find_loss(self._spec.algorithm, self._spec.task_source)
        device = compute_device(self._config.device, "trainer.device")
        use_device(device)
        join(self._spec.rendezvous, self._rank, self._num_ranks, device)
        self._resources.callback(leave)
        mesh = make_mesh(device.type, self._config)
        spec = self._spec
        self.policy = Policy(spec.checkpoint, mesh, spec.config, spec.seed, spec.tokenizer)
        self._device = device
        self._passes = Passes(
            self.policy, device, self._spec.algorithm, token_loss, self._spec.sampling.temperature
        )
        self._writer = Writer(
            self._rank,
            this_host(),
            *shard_boxes(self.policy.parameters),
            timeout_s=self._spec.weights.timeout_s,
            rdma=self._spec.rdma,
        )
        self._writer.tensors.label(self._version)
        self._resources.callback(self._writer.close)

    def _plan(self, batch: Batch) -> list[tuple[int, ...]]:
        """The micro-batches of this rank's data rank without the rows that have no gradient.

        Every rank sees the metadata of all, so all leave out the same: a micro-batch goes only if
        it is empty on every rank, and the ranks stay in step.
        """
        num_data_ranks = self._config.num_data_ranks
        assert len(batch.assignment) == num_data_ranks, "batch packed for another number of ranks"
        active = {
            i
            for i, row in enumerate(batch.rows)
            if row.num_tokens > 0 and not is_inert(row.advantage, self._spec.algorithm)
        }
        kept = [
            [tuple(i for i in positions if i in active) for positions in micro_batches]
            for micro_batches in zip(*batch.assignment, strict=True)
        ]
        return [ranks[self._data_rank] for ranks in kept if any(ranks)]

    def _update(self) -> StepStats:
        """The optimizer step, on the compute thread."""
        num_tokens = sum(row.num_tokens for row in self._rows)
        divisor = denominator(
            num_tokens, len(self._rows), self._spec.sampling.max_tokens, self._spec.algorithm
        )
        lr = learning_rate(self._config, self._version, self._spec.num_steps)
        start_ns = time.monotonic_ns()
        self._writer.tensors.begin_step()
        self._waited("publish", start_ns)
        with self._spans.span("optimizer_step", version=self._version):
            norm = self.policy.scale_gradients(divisor, self._config.max_grad_norm)
            if not math.isfinite(norm):
                shown = [row.row_id for row in self._rows[:SHOWN_ROWS]]
                raise RuntimeError(
                    f"the gradient of step {self._version} has norm {norm}; its rows are "
                    f"{shown} and {len(self._rows) - len(shown)} more: check trainer.lr"
                )
            self._is_whole = False
            self.policy.update(lr)
            self._version += 1
            self._writer.tensors.label(self._version)
            self._writer.tensors.announce()  # every step is published
            scalars = statistics(self._gather(self._passes.loss_metrics.vector()), divisor)
            self._is_whole = True
        warning = on_policy_warning(scalars) if self._version == 1 else None
        if warning and self._rank == 0:
            log.warning(warning)
        scalars |= {"grad_norm": norm, "lr": lr}
        scalars |= {"num_tokens": num_tokens, "num_rollouts": len(self._rows)}
        return StepStats(version=self._version, scalars=scalars)

    def _gather(self, vector: torch.Tensor) -> torch.Tensor:
        """The vectors of all data ranks, [data ranks, ...]; tensor-parallel ranks have the same."""
        if self._num_ranks == 1:
            return vector[None]
        vectors = [torch.empty_like(vector) for _ in range(self._num_ranks)]
        dist.all_gather(vectors, vector)
        return torch.stack(vectors[:: self._config.tensor_parallel])

    def _restore(self, folder: str) -> int:
        self._writer.tensors.begin_step()
        self._version = self.policy.restore(folder)
        self._writer.tensors.label(self._version)
        return self._version

    def _infer(self, columns: Columns) -> list[float]:
        """Every data rank runs its share of the rows, then all learn all results."""
        pairs = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        num_data_ranks = self._config.num_data_ranks
        shares = pack(lengths, num_data_ranks, self._config.tokens_per_micro_batch)
        differences = self._passes.differences(columns, shares[self._data_rank])
        return [float(difference) for difference in self._gather(differences).sum(0)]

    def _offload(self, tag: str) -> int:
        if tag == "weights":
            self._writer.tensors.invalidate(self._version)  # nothing to read until onload
            self._writer.tensors.release()
        return self._offloader.offload(tag, self.policy.movable(tag))

    def _onload(self, tag: str) -> int:
        num_bytes = self._offloader.onload(tag)
        if tag == "weights":
            self._writer.tensors.label(self._version)
        return num_bytes

    def _require_presence(self) -> None:
        """RuntimeError while weights or state are off the device: zeros lie in their place."""
        gone = [tag for tag in ("weights", "state") if self._offloader.has_left(tag)]
        if gone:
            raise RuntimeError(
                f"the trainer must enter first, got {', '.join(gone)} off the device"
            )

    async def _move(self, name: str, tag: str, move: Callable[[str], int]) -> None:
        """Move one kind on the compute thread and record how much that was."""
        start_ns = time.monotonic_ns()
        num_bytes = await self._compute.run(lambda: move(tag))
        end_ns = time.monotonic_ns()
        if num_bytes:
            self._spans.record(name, start_ns, end_ns, "mark", tag=tag, bytes=num_bytes)

    async def _aside(self, name: str, command: Callable[[], T]) -> T:
        """Run a command that is neither training nor waiting for it."""
        self._require_presence()
        self._waited("batch", self._idle_since_ns)
        with self._spans.span(name, "mark", version=self._version):
            result = await self._compute.run(command)
        self._idle_since_ns = time.monotonic_ns()
        return result

    def _waited(self, name: str, since_ns: int) -> None:
        self._spans.record(name, since_ns, time.monotonic_ns(), "wait", version=self._version)


def _check(rows: Sequence[BatchRow], columns: Columns) -> None:
    """The stored rollouts must be those the controller heard of, token for token."""
    for i, row in enumerate(rows):
        lengths = {name: len(cells[i]) for name, cells in columns.items() if name != SAMPLING}
        assert lengths.pop(PROMPT_IDS) == row.num_prompt_tokens, (row, PROMPT_IDS)
        assert set(lengths.values()) == {row.num_tokens}, (row, lengths)
