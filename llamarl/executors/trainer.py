"""One rank of the trainer.

Owns: the way from a batch of row ids to a new version of this rank's shards, and the read access
a publish has to them. Does not own: packing, losses, optimizer maths, weight transport.
Invariant: the gradient of a step is the sum over its rows divided once by a number that every rank
knows from metadata, so it depends neither on packing nor on the number of ranks; and the weights
never change while a publish reads them.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from llamarl.algorithms.losses import LossInputs, denominator, is_inert, policy_loss
from llamarl.algorithms.schedule import learning_rate
from llamarl.algorithms.tally import Tally, statistics
from llamarl.config import AlgorithmConfig, SamplingConfig, TrainerConfig
from llamarl.data.micro_batch import column, micro_batch
from llamarl.executors.compute import ComputeThread
from llamarl.metrics.span import Spans
from llamarl.models.policy import Policy
from llamarl.models.process_group import compute_device, join, leave
from llamarl.protocols import Storage
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
    FinishReason,
    StepStats,
    finish_reason,
)
from llamarl.weights.layout import Copy, Offer, RankLayout
from llamarl.weights.shards import shard_boxes
from llamarl.weights.shared_memory import this_host
from llamarl.weights.writer import Writer

T = TypeVar("T")

SHOWN_ROWS = 8  # row ids named in an error


class TrainerExecutor:
    """protocols.Trainer and protocols.Sender for one rank; calls are served in order of arrival.

    `tokenizer` is the folder an export takes its tokenizer from (None: the checkpoint);
    `rendezvous` is a file path that no earlier run used; `num_steps` ends the schedule.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        spans: Spans,
        checkpoint: str,
        tokenizer: str | None = None,
        rendezvous: str,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        sampling: SamplingConfig,
        num_steps: int,
        seed: int,
        storage: Storage,
        needs_reference: bool,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._spans = spans
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._rendezvous = rendezvous
        self._config = config
        self._algorithm = algorithm
        self._sampling = sampling
        self._num_steps = num_steps
        self._seed = seed
        self._storage = storage
        self._columns = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
        if needs_reference:
            self._columns.append(REF_LOGPROBS)
        self._compute = ComputeThread(f"trainer-{rank}")
        self._resources = ExitStack()  # what `close` gives back, however far `start` came
        self._turn = asyncio.Lock()  # collectives must start in the same order on all ranks
        self._version = 0
        self._rows: list[BatchRow] = []  # of the current step, on all ranks
        self._tally = Tally()
        self._num_reading = 0  # writes of a publish that read the weights now
        self._stable = threading.Condition()  # held while the weights change
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
        async with self._turn:
            if batch.version != self._version:
                raise RuntimeError(f"batch for version {batch.version} came at {self._version}")
            micro_batches = self._plan(batch)
            rows = [batch.rows[i] for positions in micro_batches for i in positions]
            row_ids = [row.row_id for row in rows]
            columns = await self._storage.read(row_ids, self._columns)
            _check(rows, columns)
            self._waited("batch", self._idle_since_ns)
            num_tokens = sum(row.num_tokens for row in rows)
            with self._spans.span("accumulate", version=self._version, tokens=num_tokens):
                sizes = [len(positions) for positions in micro_batches]
                logprobs = await self._compute.run(lambda: self._accumulate(rows, columns, sizes))
            if row_ids:
                await self._storage.write(row_ids, {TRAINER_LOGPROBS: logprobs})
            self._rows += batch.rows
            self._idle_since_ns = time.monotonic_ns()

    async def step(self) -> StepStats:
        """Divide the summed gradients, clip, wait for writes that read the weights, update.

        RuntimeError without a batch or if the gradient is not finite.
        """
        async with self._turn:
            if not self._rows:
                raise RuntimeError("step must follow accumulate, got no batch")
            stats = await self._compute.run(self._update)
            self._rows, self._tally = [], Tally()
            self._idle_since_ns = time.monotonic_ns()
            return stats

    async def save(self, folder: str) -> None:
        """Write this rank's shards, moments and the version into `folder`, which exists."""
        async with self._turn:
            await self._aside("save", lambda: self.policy.save(folder, self._version))

    async def restore(self, folder: str) -> int:
        """Continue from `folder`, saved under any number of ranks; returns the version."""
        async with self._turn:
            return await self._aside("restore", lambda: self._restore(folder))

    async def export(self, folder: str) -> None:
        """Write the weights in the Hugging Face layout."""
        async with self._turn:
            await self._aside("export", lambda: self.policy.export(folder))

    async def source_layout(self) -> RankLayout:
        """Where this rank keeps its boxes of the parameters."""
        return self._writer.layout()

    async def connect(self, replica: int, copies: list[Copy]) -> None:
        """Remember the copies that lead from this rank to `replica`."""
        self._writer.connect(replica, copies)

    async def write(self, version: int, offers: list[Offer]) -> dict[str, int]:
        """Write `version` into the offered memory beside the compute thread; see Sender.write.

        RuntimeError if the weights are of another version.
        """
        return await asyncio.to_thread(self._write, version, offers)

    def _build(self) -> None:
        device = compute_device(self._config.device, self._rank)
        mesh = join(self._rendezvous, self._rank, self._num_ranks, device)
        self._resources.callback(leave)
        self.policy = Policy(self._checkpoint, mesh, self._config, self._seed, self._tokenizer)
        self._device = torch.device(mesh.device_type)
        self._writer = Writer(self._rank, this_host(), *shard_boxes(self.policy.parameters))
        self._resources.callback(self._writer.close)

    def _plan(self, batch: Batch) -> list[tuple[int, ...]]:
        """This rank's micro-batches without the rows that have no gradient.

        Every rank sees the metadata of all, so all leave out the same: a micro-batch goes only if
        it is empty on every rank, and the ranks stay in step.
        """
        assert len(batch.assignment) == self._num_ranks, "batch packed for another number of ranks"
        active = {
            i
            for i, row in enumerate(batch.rows)
            if row.num_tokens > 0 and not is_inert(row.advantage, self._algorithm)
        }
        kept = [
            [tuple(i for i in positions if i in active) for positions in micro_batches]
            for micro_batches in zip(*batch.assignment, strict=True)
        ]
        return [ranks[self._rank] for ranks in kept if any(ranks)]

    def _accumulate(
        self, rows: Sequence[BatchRow], columns: Columns, sizes: Sequence[int]
    ) -> list[np.ndarray]:
        """Forward and backward of this rank's micro-batches: `rows` cut into runs of `sizes`."""
        logprobs: list[np.ndarray] = []
        start = 0
        for size in sizes:
            logprobs += self._forward_backward(rows, columns, range(start, start + size))
            start += size
        return logprobs

    def _forward_backward(
        self, rows: Sequence[BatchRow], columns: Columns, indices: range
    ) -> list[np.ndarray]:
        """Add one micro-batch to the gradients; returns log pi of its rollouts."""
        packed = micro_batch(columns, indices, self._device)
        stats = self.policy.model(
            packed.token_ids, packed.lengths, packed.targets, self._sampling.temperature
        )
        trainer_logprobs = stats.logprobs[packed.response]
        if not indices:
            trainer_logprobs.sum().backward()  # zero, but the other ranks need our part
            return []
        lengths = torch.tensor(packed.response_lengths, device=self._device)
        index = torch.repeat_interleave(lengths)
        advantages = torch.tensor([rows[i].advantage for i in indices], device=self._device)
        has_reference = REF_LOGPROBS in columns
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=column(columns, GENERATOR_LOGPROBS, indices, self._device),
            advantages=advantages[index],
            weights=self._token_weights(rows, columns, indices),
            entropy=stats.entropy[packed.response],
            rollout_index=index,
            rollout_lengths=lengths,
            ref_logprobs=(
                column(columns, REF_LOGPROBS, indices, self._device) if has_reference else None
            ),
        )
        outputs = policy_loss(inputs, self._algorithm)
        if not math.isfinite(outputs.loss.item()):
            named = [rows[i].row_id for i in indices]
            raise RuntimeError(
                f"the loss of step {self._version} is {outputs.loss.item()} in rows {named}: check "
                "trainer.lr, rewards and the generator's log-probs"
            )
        outputs.loss.backward()
        self._tally.add(outputs, len(index))
        values = trainer_logprobs.detach().cpu()
        return [part.numpy() for part in values.split(list(packed.response_lengths))]

    def _token_weights(
        self, rows: Sequence[BatchRow], columns: Columns, indices: range
    ) -> torch.Tensor:
        """float32 [T]: 0 for tokens that are too stale, or truncated and to be masked."""
        masks = []
        for i in indices:
            is_trained = columns[TOKEN_VERSIONS][i] >= rows[i].oldest_version
            if self._algorithm.mask_truncated:
                is_trained &= finish_reason(columns[SAMPLING][i]) is not FinishReason.LENGTH
            masks.append(is_trained)
        return torch.from_numpy(np.concatenate(masks).astype(np.float32)).to(self._device)

    def _update(self) -> StepStats:
        """The optimizer step, on the compute thread."""
        num_tokens = sum(row.num_tokens for row in self._rows)
        divisor = denominator(
            num_tokens, len(self._rows), self._sampling.max_tokens, self._algorithm
        )
        lr = learning_rate(self._config, self._version, self._num_steps)
        with self._stable:
            start_ns = time.monotonic_ns()
            if self._num_reading:
                self._stable.wait_for(lambda: self._num_reading == 0)
                self._waited("publish", start_ns)
            with self._spans.span("optimizer_step", version=self._version):
                norm = self.policy.scale_gradients(divisor, self._config.max_grad_norm)
                if not math.isfinite(norm):
                    shown = [row.row_id for row in self._rows[:SHOWN_ROWS]]
                    raise RuntimeError(
                        f"the gradient of step {self._version} has norm {norm}; its rows are "
                        f"{shown} and {len(self._rows) - len(shown)} more: check trainer.lr"
                    )
                self.policy.update(lr)
                self._version += 1
                scalars = statistics(self._gather(self._tally.vector()), divisor)
        scalars |= {"grad_norm": norm, "lr": lr}
        scalars |= {"num_tokens": num_tokens, "num_rollouts": len(self._rows)}
        return StepStats(version=self._version, scalars=scalars)

    def _gather(self, vector: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks, [ranks, ...]."""
        if self._num_ranks == 1:
            return vector[None]
        vectors = [torch.empty_like(vector) for _ in range(self._num_ranks)]
        dist.all_gather(vectors, vector)
        return torch.stack(vectors)

    def _restore(self, folder: str) -> int:
        with self._stable:
            self._stable.wait_for(lambda: self._num_reading == 0)
            self._version = self.policy.restore(folder)
        return self._version

    def _write(self, version: int, offers: list[Offer]) -> dict[str, int]:
        with self._stable:
            if version != self._version:
                raise RuntimeError(f"write of version {version} came at version {self._version}")
            self._num_reading += 1
        try:
            with self._spans.span("write", "publish", version=version):
                return self._writer.write(version, offers)
        finally:
            with self._stable:
                self._num_reading -= 1
                self._stable.notify_all()

    async def _aside(self, name: str, command: Callable[[], T]) -> T:
        """Run a command that is neither training nor waiting for it."""
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
