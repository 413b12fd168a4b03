"""What a trainer rank does on its compute thread.

Owns: what turns rollouts into a new version of this rank's shards, and which of these are on the
device. Does not own: packing, passes, optimizer maths, weight transport. Invariant: the gradient of
a step is the sum over its rows divided once by a number that every rank knows from metadata, so it
depends neither on packing nor on the number of ranks; and the weights never change while a publish
reads them.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from llamarl.algorithms.loss_metrics import (
    LossMetrics,
    empty_step_warning,
    on_policy_warning,
    statistics,
)
from llamarl.algorithms.losses import find_loss
from llamarl.algorithms.policy_loss import denominator, is_inert
from llamarl.algorithms.schedule import learning_rate
from llamarl.data.packing import pack
from llamarl.device.devices import compute_device, use_device
from llamarl.executors.memory_mover import MemoryMover
from llamarl.executors.passes import Passes
from llamarl.executors.specs import TrainerSpec
from llamarl.executors.weight_source import SourcePart
from llamarl.groups import Batch, BatchRollout, StepStats
from llamarl.metrics.span import Spans
from llamarl.models.parallelize import make_mesh
from llamarl.models.policy import Policy
from llamarl.models.process_group import join, leave
from llamarl.repeated_warnings import RepeatedWarnings
from llamarl.types import PROMPT_IDS, RESPONSE_IDS, Columns
from llamarl.weights.layout.formats import Format
from llamarl.weights.layout.shards import cut_rows, shard_boxes
from llamarl.weights.quantization.frozen_sums import shard_sums
from llamarl.weights.transports.available import available_bytes
from llamarl.weights.transports.shared_memory import this_host

log = logging.getLogger(__name__)

SHOWN_ROWS = 8  # row ids named in an error


class PolicyStep:
    """One rank's policy. Its methods belong on the compute thread, but for `share`, `prefetch` and
    `require_presence`; all but these, `offload` and `onload` are called on all ranks.

    Joins the other ranks; `resources` takes what is to be given back, however far that came.
    ValueError if the checkpoint is missing or does not fit.
    """

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
        frozen = self.policy.frozen
        self.passes = Passes(self.policy, device, spec, token_loss)
        self.source = SourcePart(
            rank,
            *shard_boxes(self.policy.parameters),
            config=spec.weights,
            rdma=spec.rdma,
            spans=spans,
            formats=() if frozen else [kind for kind in spec.kinds if isinstance(kind, Format)],
            cut=cut_rows(self.policy.parameters),
            num_ranks=num_ranks,
            frozen=self._sums_of(frozen) if frozen else None,
        )
        resources.callback(self.source.close)
        self.version = 0
        self.source.label(self.version)
        self._rows: list[BatchRollout] = []  # of the current step, on all ranks
        self._is_whole = True  # False while an update runs
        self._warnings = RepeatedWarnings(log)

    def _sums_of(self, frozen: Mapping[str, torch.Tensor]) -> Mapping[str, Mapping[str, int]]:
        """Of weights beside adapters, for replicas of each kind."""
        place = self._rank, self._num_ranks, self._spec.config.replicate
        return shard_sums(frozen, self._spec.kinds, *place)

    def share(self, batch: Batch) -> list[tuple[int, ...]]:
        """The micro-batches of this rank's data rank without the rows that have no gradient.

        Every rank sees the metadata of all, so all leave out the same: a micro-batch goes only if
        it is empty on every rank, and the ranks stay in step.
        """
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
        self, batch: Batch, rows: Sequence[BatchRollout], columns: Columns, sizes: Sequence[int]
    ) -> Columns:
        """Add the gradients of this rank's `rows` of `batch`, in micro-batches of `sizes`, to the
        step; returns the columns that `Passes.accumulate` found of each row."""
        first = batch.version if batch.first_version is None else batch.first_version
        found = self.passes.accumulate(rows, columns, sizes, batch.version, first)
        self._rows += batch.rows
        return found

    def step(self) -> StepStats:
        """Divide the summed gradients, clip, update; a write of this version goes on reading a
        snapshot. Where no token was trained, the next version has the same weights and moments:
        weight decay and momentum would change them. RuntimeError without a batch, or if a loss or
        the gradient is not finite."""
        rows, spec = self._rows, self._spec
        if not rows:
            raise RuntimeError("step must follow accumulate, got no batch")
        num_tokens = sum(row.num_generated for row in rows)
        divisor = denominator(num_tokens, len(rows), spec.sampling.max_tokens, spec.algorithm)
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
        self._rows, self.passes.loss_metrics = [], LossMetrics()
        self._warn(scalars)
        scalars |= {"grad_norm": norm, "lr": lr}
        scalars |= {"num_tokens": num_tokens, "num_rollouts": len(rows)}
        return StepStats(version=self.version, scalars=scalars)

    def snapshot(self) -> bool:
        """Copy what `save` would write to host memory; False if it has too little."""
        self._require_whole()
        return self.policy.copy(self.version, this_host(), available_bytes)

    def save(self, folder: str) -> None:
        """Write this rank's shards, moments and the version into `folder`, which exists.

        RuntimeError after a step that failed during its update: weights may be of either version.
        """
        self._require_whole()
        self.policy.save(folder, self.version)

    def restore(self, folder: str) -> int:
        """Continue from `folder`, saved under any number of ranks; returns the version."""
        self.source.tensors.begin_step()
        self.version = self.policy.restore(folder)
        self.source.label(self.version)
        return self.version

    def infer(self, columns: Columns) -> list[float]:
        """Largest |log pi - log mu| of each row: every data rank runs its share, all get all."""
        pairs = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        config = self._spec.config
        shares = pack(lengths, config.num_data_ranks, config.tokens_per_micro_batch)
        differences = self.passes.differences(columns, shares[self._data_rank])
        return [float(difference) for difference in self._gather(differences).sum(0)]

    def offload(self, tag: str) -> int:
        """Move "weights" or "state" (gradients and moments) off the device; returns the bytes."""
        return self._mover.offload(tag, self.policy.movable(tag))

    def prefetch(self, tag: str) -> None:
        """Start reading what was offloaded."""
        self._mover.prefetch(tag)

    def onload(self, tag: str) -> int:
        """Bring it back; returns the bytes."""
        return self._mover.onload(tag)

    def require_presence(self) -> None:
        """RuntimeError while weights or state are off the device: zeros lie in their place."""
        if gone := [tag for tag in self.tags if self._mover.is_away(tag)]:
            raise RuntimeError(
                f"weights and state must be on the trainer's device, got {', '.join(gone)} off it"
            )

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise RuntimeError(f"the step to version {self.version} broke amid its update")

    def _warn(self, scalars: dict[str, float]) -> None:
        """Of a step without a trained token, and of a first one that is off its policy; rank 0 for
        all."""
        warning = empty_step_warning(scalars, self._spec.algorithm.mask_truncated)
        if self.version == 1:
            warning = warning or on_policy_warning(scalars)
        if warning and self._rank == 0:
            self._warnings.warn(warning)

    def _require_finite(self, norm: float, loss: float) -> None:
        """Asked once for the whole step, with numbers of all ranks: each question waits for the
        device, and a rank that left alone would let the others wait."""
        if broken := None if math.isfinite(loss) else self.passes.loss_metrics.broken():
            raise RuntimeError(
                f"the loss of step {self.version} is {broken[0]} in rows {[*broken[1]]}: check "
                "trainer.lr, rewards and the generator's log-probs"
            )
        if not (math.isfinite(norm) and math.isfinite(loss)):
            shown = [row.row_id for row in self._rows[:SHOWN_ROWS]]
            raise RuntimeError(
                f"the gradient of step {self.version} has norm {norm}; its rows are "
                f"{shown} and {len(self._rows) - len(shown)} more: check trainer.lr"
            )

    def _gather(self, vector: torch.Tensor) -> torch.Tensor:
        """The vectors of all data ranks, [data ranks, ...]; tensor-parallel ranks have the same."""
        if self._num_ranks == 1:
            return vector[None]
        vectors = [torch.empty_like(vector) for _ in range(self._num_ranks)]
        dist.all_gather(vectors, vector)
        return torch.stack(vectors[:: self._spec.config.tensor_parallel])
