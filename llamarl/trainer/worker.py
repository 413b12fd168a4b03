"""One rank of the trainer: its methods, and the work of its compute thread."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist

from llamarl.core.compute import ComputeThread
from llamarl.core.device.devices import compute_device, use_device
from llamarl.core.errors import Diverged, RepeatedWarnings
from llamarl.core.faces import Offloadable, Trainer, Worker
from llamarl.core.groups import Batch, BatchRollout, StepStats
from llamarl.core.process_group import join, leave
from llamarl.core.records import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    LOSS_WEIGHTS,
    NO_VERSION,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    episode_of,
)
from llamarl.metrics.span import Spans
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.fingerprint import shard_sums
from llamarl.publish.layout import Format, RankLayout, Route, StagingHandle
from llamarl.publish.offload import MemoryMover, OffloadPart
from llamarl.publish.replica import WeightSource
from llamarl.publish.shards import cut_rows, shard_boxes
from llamarl.publish.source import SourcePart
from llamarl.storage.client import RecordingStore
from llamarl.trainer.losses import find_loss
from llamarl.trainer.packing import pack
from llamarl.trainer.parallel import make_mesh
from llamarl.trainer.passes import Passes, RoutingTotals
from llamarl.trainer.policy import Policy, learning_rate
from llamarl.trainer.policy_loss import (
    LossMetrics,
    denominator,
    empty_step_warning,
    is_inert,
    on_policy_warning,
    statistics,
)
from llamarl.trainer.specs import TrainerSpec

log = logging.getLogger(__name__)

SHOWN_ROWS = 8  # row ids named in an error


class PolicyStep:
    """One rank's policy. Its methods belong on the compute thread, except `share`, `prefetch` and
    `require_presence`; all but these, `offload` and `onload` are called on all ranks.

    Making it joins the other ranks; `resources` takes what is to be given back, however far that
    came. Raises ValueError if the checkpoint is missing or does not fit."""

    tags: tuple[str, ...] = ("weights", "state")

    def __init__(
        self, spec: TrainerSpec, rank: int, num_ranks: int, spans: Spans, resources: ExitStack
    ) -> None:
        self._spec, self._rank, self._num_ranks, self._spans = spec, rank, num_ranks, spans
        self._data_rank = rank // spec.config.tensor_parallel
        self._mover = MemoryMover.placed(spec.placement, spec.run_dir, f"trainer-{rank}")
        resources.callback(self._mover.close)
        token_loss = find_loss(spec.algorithm, spec.task_source)
        device = compute_device(spec.config.device, "trainer.device")
        use_device(device)
        join(spec.rendezvous, rank, num_ranks, device)
        resources.callback(leave)
        mesh = make_mesh(device.type, spec.config)
        folders = spec.tokenizer, spec.adapter
        self.policy = Policy.load(spec.checkpoint, mesh, spec.config, spec.seed, *folders)
        frozen, place = self.policy.frozen, (rank, num_ranks, spec.config.replicate)
        self.passes = Passes(self.policy, device, spec, token_loss)
        self.source = SourcePart(
            rank,
            *shard_boxes(self.policy.parameters),
            config=spec.weights,
            spans=spans,
            formats=() if frozen else [kind for kind in spec.kinds if isinstance(kind, Format)],
            cut=cut_rows(self.policy.parameters),
            num_ranks=num_ranks,
            frozen=shard_sums(frozen, spec.kinds, *place) if frozen else None,
        )
        resources.callback(self.source.close)
        self.version = 0
        self.source.label(self.version)
        self._rows: list[BatchRollout] = []  # of the current step, on all ranks
        self._is_whole = True  # False while an update runs
        self._warnings = RepeatedWarnings(log)

    def share(self, batch: Batch) -> list[tuple[int, ...]]:
        """Return the micro-batches of this rank's data rank without the rows that have no gradient.

        Every rank sees the metadata of all, so all leave out the same: a micro-batch is left out
        only if it is empty on every rank, and the ranks stay in step."""
        num_data_ranks = self._spec.config.num_data_ranks
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

    def accumulate(
        self,
        batch: Batch,
        rows: Sequence[BatchRollout],
        columns: Columns,
        micro_batches: Sequence[Sequence[int]],
    ) -> Columns:
        """Add the gradients of this rank's `rows` of `batch` to the step, as `Passes.accumulate`
        does."""
        first = batch.version if batch.first_version is None else batch.first_version
        found = self.passes.accumulate(rows, columns, micro_batches, batch.version, first)
        self._rows += batch.rows
        return found

    def step(self) -> StepStats:
        """Divide the summed gradients, clip, update; a write of this version goes on reading a
        snapshot. If no token was trained, the next version has the same weights and moments: weight
        decay and momentum would change them. Raises RuntimeError without a batch, or if a loss or
        the gradient is not finite."""
        rows, spec = self._rows, self._spec
        if not rows:
            raise RuntimeError("step must follow accumulate, got no batch")
        num_tokens = sum(row.num_generated for row in rows)
        num_rollouts = len({episode_of(row.row_id)[0] for row in rows})
        divisor = denominator(num_tokens, num_rollouts, spec.sampling.max_tokens, spec.algorithm)
        lr = learning_rate(spec.config, self.version, spec.num_steps)
        with self._spans.span("publish", "wait", version=self.version):
            self.source.tensors.begin_step()
        with self._spans.span("optimizer_step", version=self.version):
            norm = self.policy.scale_gradients(divisor, spec.config.max_grad_norm)
            scalars = statistics(self._gather(self.passes.loss_metrics.vector()), divisor)
            self._require_finite(norm, scalars["loss"])
            self._is_whole = False
            if scalars["trained_tokens"]:
                self.policy.update(lr)
            else:
                self.policy.drop_gradients()
            self.version += 1
            self.source.label(self.version)
            self.source.tensors.announce()  # every step is published
            self._is_whole = True
        of_routers, loads = self.passes.routing.reduce()
        self._rows, self.passes.loss_metrics = [], LossMetrics()
        self.passes.routing = RoutingTotals()
        self._warn(scalars)
        scalars |= {"grad_norm": norm, "lr": lr}
        scalars |= {"num_tokens": num_tokens, "num_rollouts": num_rollouts}
        scalars |= of_routers
        return StepStats(version=self.version, scalars=scalars, expert_loads=loads)

    def snapshot(self) -> bool:
        """Copy what `save` would write to host memory. Returns False if that is too small."""
        self._require_whole()
        return self.policy.snapshot.take(self.policy.state(self.version))

    def save(self, folder: str) -> None:
        """Write this rank's shards, moments and the version into `folder`, which exists.

        Raises RuntimeError after a step that failed during its update: weights may be of either
        version."""
        self._require_whole()
        self.policy.snapshot.write(folder, self.policy.state(self.version))

    def restore(self, folder: str) -> int:
        """Continue from `folder`, saved under any number of ranks. Returns its version."""
        self.source.tensors.begin_step()
        self.version = self.policy.restore(folder)
        self.source.label(self.version)
        return self.version

    def infer(self, columns: Columns) -> list[float]:
        """Return the largest |log pi - log mu| of each row: every data rank runs its share, and all
        get all."""
        pairs = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        config = self._spec.config
        shares = pack(lengths, config.num_data_ranks, config.tokens_per_micro_batch)
        differences = torch.zeros(len(lengths), dtype=torch.float64)
        for i, logprobs in self.passes.infer(columns, shares[self._data_rank]).items():
            is_written = columns[TOKEN_VERSIONS][i] != NO_VERSION
            difference = np.abs(logprobs - columns[GENERATOR_LOGPROBS][i])[is_written]
            differences[i] = float(difference.max(initial=0.0))
        return self._gather(differences).sum(0).tolist()

    def offload(self, tag: str) -> int:
        """Move "weights" or "state" (gradients and moments) off the device. Returns the number of
        bytes."""
        return self._mover.offload(tag, self.policy.movable(tag))

    def prefetch(self, tag: str) -> None:
        """Start reading the offloaded memory of a tag."""
        self._mover.prefetch(tag)

    def onload(self, tag: str) -> int:
        """Bring the memory of a tag back. Returns the number of bytes."""
        return self._mover.onload(tag)

    def require_presence(self) -> None:
        """Raise RuntimeError while weights or state are off the device, as zeros lie in their
        place."""
        if gone := [tag for tag in self.tags if self._mover.is_away(tag)]:
            raise RuntimeError(
                f"weights and state must be on the trainer's device, got {', '.join(gone)} off it"
            )

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise RuntimeError(f"the step to version {self.version} broke amid its update")

    def _warn(self, scalars: dict[str, float]) -> None:
        """Warn, on rank 0 for all, of a step without a trained token, and of a first step that is
        off its policy."""
        warning = empty_step_warning(scalars, self._spec.algorithm.mask_truncated)
        if self.version == 1:
            warning = warning or on_policy_warning(scalars)
        if warning and self._rank == 0:
            self._warnings.warn(warning)

    def _require_finite(self, norm: float, loss: float) -> None:
        """Raise Diverged unless loss and gradient are finite. It is checked once for the whole
        step, with numbers of all ranks: each check waits for the device, and a rank that raised
        alone would let the others wait."""
        if broken := None if math.isfinite(loss) else self.passes.loss_metrics.broken():
            raise Diverged(
                f"the loss of step {self.version} is {broken[0]} in rows {[*broken[1]]}: check "
                "trainer.lr, rewards and the generator's log-probs"
            )
        if not (math.isfinite(norm) and math.isfinite(loss)):
            shown = [row.row_id for row in self._rows[:SHOWN_ROWS]]
            raise Diverged(
                f"the gradient of step {self.version} has norm {norm}; its rows are "
                f"{shown} and {len(self._rows) - len(shown)} more: check trainer.lr"
            )

    def _gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all data ranks, [data ranks, ...]; tensor-parallel ranks have the
        same."""
        if self._num_ranks == 1:
            return vector[None]
        vectors = [torch.empty_like(vector) for _ in range(self._num_ranks)]
        dist.all_gather(vectors, vector)
        return torch.stack(vectors[:: self._spec.config.tensor_parallel])


class TrainerWorker(Worker, Trainer, WeightSource, Offloadable):
    """One rank of the trainer."""

    def __init__(self, spec: TrainerSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, self._spans = spec, spans
        self._rank, self._num_ranks = rank, num_ranks
        self._storage = RecordingStore(spec.storage, spans)
        self._columns = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
        if spec.algorithm.runs_reference(spec.config.lora):
            self._columns.append(REF_LOGPROBS)
        self._columns += spec.algorithm.loss_columns
        self._recorded = [ROUTED_EXPERTS] * spec.replays_routing  # what every pass reads beside ids
        self._recorded += [KEPT_IDS] * (spec.sampling.top_k > 0)
        self._columns += self._recorded
        self._recomputes = spec.algorithm.proximal == "recompute"
        self._thread = ComputeThread(f"trainer-{rank}")
        self._resources = ExitStack()  # what `close` gives back, however far `start` came
        self._lock = asyncio.Lock()
        self._parts: tuple[PolicyStep, OffloadPart] | None = None  # once it is started
        self._idle_since_ns = time.monotonic_ns()

    @property
    def policy_step(self) -> PolicyStep:
        """The policy of this rank. Raises RuntimeError before `start`."""
        return self._started()[0]

    def _started(self) -> tuple[PolicyStep, OffloadPart]:
        if self._parts is None:
            raise RuntimeError("the trainer must be started first")
        return self._parts

    async def start(self) -> None:
        """Join the other ranks and load this rank's slices of the checkpoint.

        Raises ValueError if the checkpoint is missing or does not fit."""
        place = self._rank, self._num_ranks, self._spans, self._resources
        policy_step = await self._thread.run(lambda: PolicyStep(self._spec, *place))
        offloading = OffloadPart(policy_step, self._run, self._spans, policy_step.source)
        self._parts = policy_step, offloading
        self._idle_since_ns = time.monotonic_ns()

    async def close(self) -> None:
        """Leave the process group and end the compute thread."""
        await self._thread.run(self._resources.close)
        self._thread.close()

    async def accumulate(self, batch: Batch) -> None:
        """Fetch this rank's rows, add their gradients to the step, and store `trainer_logprobs`;
        for rollouts that are kept also which tokens had weight and were clipped.

        Raises RuntimeError if the batch is meant for another version."""
        is_later = batch.first_version not in (None, batch.version)
        names = self._columns + [PROXIMAL_LOGPROBS] * (is_later and self._recomputes)
        async with self._turn() as policy_step:
            rows, micro_batches, columns = await self._fetch(policy_step, batch, names)
            num_tokens = sum(row.num_tokens for row in rows)
            with self._spans.span("accumulate", version=policy_step.version, tokens=num_tokens):
                found = await self._thread.run(
                    lambda: policy_step.accumulate(batch, rows, columns, micro_batches)
                )
            if self._recomputes and not is_later and self._spec.config.num_passes > 1:
                found[PROXIMAL_LOGPROBS] = found[TRAINER_LOGPROBS]
            await self._store(rows, found)

    async def store_proximal(self, batch: Batch) -> None:
        """Fetch this rank's rows, and store their log-probs under the present version.

        Raises RuntimeError if the batch is meant for another version."""
        async with self._turn() as policy_step:
            names = [PROMPT_IDS, RESPONSE_IDS, *self._recorded]
            rows, micro_batches, columns = await self._fetch(policy_step, batch, names)
            with self._spans.span("proximal", version=policy_step.version):
                infer = partial(policy_step.passes.infer, columns, micro_batches)
                found = await self._thread.run(infer)
            await self._store(rows, {PROXIMAL_LOGPROBS: [found[i] for i in range(len(rows))]})

    async def _fetch(
        self, policy_step: PolicyStep, batch: Batch, names: Sequence[str]
    ) -> tuple[list[BatchRollout], list[range], Columns]:
        """Return this rank's rows, their places by micro-batch, and the columns of the rows."""
        if batch.version != policy_step.version:
            raise RuntimeError(f"batch for version {batch.version} came at {policy_step.version}")
        share = policy_step.share(batch)
        rows = [batch.rows[i] for positions in share for i in positions]
        columns = await self._storage.read([row.row_id for row in rows], [*names])
        _check(rows, columns)
        self._end_idle()
        cuts = pairwise(accumulate(map(len, share), initial=0))
        return rows, [range(start, end) for start, end in cuts], columns

    async def step(self) -> StepStats:
        async with self._turn() as policy_step:
            return await self._thread.run(policy_step.step)

    async def snapshot(self) -> bool:
        async with self._aside("snapshot") as policy_step:
            return await self._thread.run(policy_step.snapshot)

    async def save(self, folder: str, from_snapshot: bool = False) -> None:
        if from_snapshot:  # beside training, on a thread of its own
            with self._spans.span("save", "mark"):
                return await asyncio.to_thread(self.policy_step.policy.snapshot.write_copy, folder)
        async with self._aside("save") as policy_step:
            await self._thread.run(partial(policy_step.save, folder))

    async def restore(self, folder: str) -> int:
        async with self._aside("restore") as policy_step:
            return await self._thread.run(partial(policy_step.restore, folder))

    async def export(self, folder: str, dtype: str) -> None:
        async with self._aside("export") as policy_step:
            await self._thread.run(partial(policy_step.policy.export, folder, dtype))

    async def infer(self, row_ids: list[int]) -> list[float]:
        """See `Trainer`; the result is the same on all ranks. Every rank needs the lengths of all
        rows, to know what the others run, so it reads them all: it is meant for a few short
        rows."""
        if not row_ids:
            return []
        names = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, *self._recorded]
        async with self._aside("infer") as policy_step:
            columns = await self._storage.read(row_ids, names)
            return await self._thread.run(partial(policy_step.infer, columns))

    async def source_layout(self) -> RankLayout:
        return await self.policy_step.source.source_layout()

    async def connect_target(self, replica: int, route: Route | None) -> None:
        await self.policy_step.source.connect_target(replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        return await self.policy_step.source.write(version, handles)

    async def offload(self, tags: list[str]) -> None:
        await self._started()[1].offload(tags)

    async def prefetch(self, tags: list[str]) -> None:
        await self._started()[1].prefetch(tags)

    async def onload(self, tags: list[str]) -> None:
        await self._started()[1].onload(tags)

    async def _store(self, rows: Sequence[BatchRollout], found: Columns) -> None:
        """Store the columns of these rows, on one of the tensor-parallel ranks, which all have the
        same."""
        if self._rank % self._spec.config.tensor_parallel:
            return
        all_rows, kept = [*range(len(rows))], [i for i, row in enumerate(rows) if row.is_kept]
        of_all = [name for name in (TRAINER_LOGPROBS, PROXIMAL_LOGPROBS) if name in found]
        of_kept = [name for name in (LOSS_WEIGHTS, CLIPPED, REF_LOGPROBS) if name in found]
        for names, places in ((of_all, all_rows), (of_kept, kept)):
            if names and places:
                columns = {name: [found[name][i] for i in places] for name in names}
                await self._storage.write([rows[i].row_id for i in places], columns)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[PolicyStep]:
        """Run the block alone, with all memory on the device; the wait for a batch is counted from
        its end."""
        async with self._lock:
            self.policy_step.require_presence()
            yield self.policy_step
            self._idle_since_ns = time.monotonic_ns()

    @asynccontextmanager
    async def _aside(self, name: str) -> AsyncIterator[PolicyStep]:
        """Run the block in its turn, as work that is neither training nor waiting for it."""
        async with self._turn() as policy_step:
            self._end_idle()
            with self._spans.span(name, "mark", version=policy_step.version):
                yield policy_step

    async def _run(self, call: Callable[[], None], key: object) -> None:
        """Run a move of memory on the compute thread, after the calls before it."""
        async with self._lock:
            await self._thread.run(call, key)

    def _end_idle(self) -> None:
        """Record that a batch was waited for until now."""
        now_ns, version = time.monotonic_ns(), self.policy_step.version
        self._spans.record("batch", self._idle_since_ns, now_ns, "wait", version=version)


def _check(rows: Sequence[BatchRollout], columns: Columns) -> None:
    """Assert that the stored rollouts are those the controller knows, token for token."""
    for i, row in enumerate(rows):
        others = (SAMPLING, ROUTED_EXPERTS, KEPT_IDS)
        lengths = {name: len(cells[i]) for name, cells in columns.items() if name not in others}
        assert lengths.pop(PROMPT_IDS) == row.num_prompt_tokens, (row, PROMPT_IDS)
        assert set(lengths.values()) == {row.num_tokens}, (row, lengths)
