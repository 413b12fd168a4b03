"""One rank of the trainer.

Owns: the order of calls, and what is read from storage and written there. Does not own: what a
step computes (`policy_step.py`). Invariant: calls are served one at a time in order of arrival, for
collectives must start in the same order on all ranks.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from llamarl.executors.compute import ComputeThread
from llamarl.executors.offloadable import OffloadPart
from llamarl.executors.policy_step import PolicyStep
from llamarl.executors.specs import TrainerSpec
from llamarl.groups import Batch, BatchRollout, StepStats
from llamarl.metrics.span import Spans
from llamarl.storage.store import RecordingStore
from llamarl.types import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
)


class TrainerExecutor:
    """protocols.Trainer for one rank, and by its components WeightSource and Offloadable."""

    def __init__(self, spec: TrainerSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, self._spans = spec, spans
        self._rank, self._num_ranks = rank, num_ranks
        self._storage = RecordingStore(spec.storage, spans)
        self._columns = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
        if spec.algorithm.runs_reference(spec.config.lora):
            self._columns.append(REF_LOGPROBS)
        self._columns += spec.algorithm.loss_columns
        self._recomputes = spec.algorithm.proximal == "recompute"
        self._thread = ComputeThread(f"trainer-{rank}")
        self._resources = ExitStack()  # what `close` gives back, however far `start` came
        self._lock = asyncio.Lock()
        self._policy_step: PolicyStep | None = None
        self._offload: OffloadPart | None = None
        self._idle_since_ns = time.monotonic_ns()

    @property
    def policy_step(self) -> PolicyStep:
        """RuntimeError before `start`."""
        if self._policy_step is None:
            raise RuntimeError("the trainer must be started first")
        return self._policy_step

    @property
    def components(self) -> tuple[object, ...]:
        """Their methods are the executor's: WeightSource, Offloadable."""
        return self.policy_step.source, self._offload

    async def start(self) -> None:
        """Join the other ranks and load this rank's slices of the checkpoint.

        ValueError if the checkpoint is missing or does not fit.
        """
        place = self._rank, self._num_ranks, self._spans, self._resources
        policy_step = await self._thread.run(lambda: PolicyStep(self._spec, *place))
        self._offload = OffloadPart(policy_step, self._run, self._spans, policy_step.source)
        self._policy_step = policy_step
        self._idle_since_ns = time.monotonic_ns()

    async def close(self) -> None:
        """Leave the process group and end the compute thread."""
        await self._thread.run(self._resources.close)
        self._thread.close()

    async def accumulate(self, batch: Batch) -> None:
        """Fetch this rank's rows, add their gradients to the step, store `trainer_logprobs`; and of
        rollouts that are kept which tokens had weight and were clipped.

        RuntimeError if the batch is meant for another version.
        """
        is_later = batch.first_version not in (None, batch.version)
        names = self._columns + [PROXIMAL_LOGPROBS] * (is_later and self._recomputes)
        async with self._turn() as policy_step:
            rows, sizes, columns = await self._fetch(policy_step, batch, names)
            num_tokens = sum(row.num_tokens for row in rows)
            with self._spans.span("accumulate", version=policy_step.version, tokens=num_tokens):
                found = await self._thread.run(
                    lambda: policy_step.accumulate(batch, rows, columns, sizes)
                )
            if self._recomputes and not is_later and self._spec.config.num_passes > 1:
                found[PROXIMAL_LOGPROBS] = found[TRAINER_LOGPROBS]
            await self._store(rows, found)

    async def store_proximal(self, batch: Batch) -> None:
        """Fetch this rank's rows, store their log-probs under the present version.

        RuntimeError if the batch is meant for another version.
        """
        async with self._turn() as policy_step:
            names = [PROMPT_IDS, RESPONSE_IDS]
            rows, sizes, columns = await self._fetch(policy_step, batch, names)
            with self._spans.span("proximal", version=policy_step.version):
                found = await self._thread.run(lambda: policy_step.passes.infer(columns, sizes))
            await self._store(rows, {PROXIMAL_LOGPROBS: found})

    async def _fetch(
        self, policy_step: PolicyStep, batch: Batch, names: Sequence[str]
    ) -> tuple[list[BatchRollout], list[int], Columns]:
        """This rank's rows, how many are in each micro-batch, and their columns."""
        if batch.version != policy_step.version:
            raise RuntimeError(f"batch for version {batch.version} came at {policy_step.version}")
        micro_batches = policy_step.share(batch)
        rows = [batch.rows[i] for positions in micro_batches for i in positions]
        columns = await self._storage.read([row.row_id for row in rows], [*names])
        _check(rows, columns)
        self._end_idle()
        return rows, [len(positions) for positions in micro_batches], columns

    async def step(self) -> StepStats:
        """See `PolicyStep.step`."""
        async with self._turn() as policy_step:
            return await self._thread.run(policy_step.step)

    async def snapshot(self) -> bool:
        """See `PolicyStep.snapshot`."""
        async with self._aside("snapshot") as policy_step:
            return await self._thread.run(policy_step.snapshot)

    async def save(self, folder: str, from_snapshot: bool = False) -> None:
        """See `PolicyStep.save`; `from_snapshot` writes beside training, on a thread of its own."""
        if from_snapshot:
            with self._spans.span("save", "mark"):
                return await asyncio.to_thread(self.policy_step.policy.snapshot.write_copy, folder)
        async with self._aside("save") as policy_step:
            await self._thread.run(partial(policy_step.save, folder))

    async def restore(self, folder: str) -> int:
        """See `PolicyStep.restore`."""
        async with self._aside("restore") as policy_step:
            return await self._thread.run(partial(policy_step.restore, folder))

    async def export(self, folder: str, dtype: str) -> None:
        """Write the weights, rounded to `dtype`, in the Hugging Face layout."""
        async with self._aside("export") as policy_step:
            await self._thread.run(partial(policy_step.policy.export, folder, dtype))

    async def infer(self, row_ids: list[int]) -> list[float]:
        """Largest |log pi - log mu| over what the model wrote of each row; the same on all ranks.

        Every rank needs the lengths of all rows, to know what the others run, so it reads them all:
        it is meant for a few short rows.
        """
        if not row_ids:
            return []
        names = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS]
        async with self._aside("infer") as policy_step:
            columns = await self._storage.read(row_ids, names)
            return await self._thread.run(partial(policy_step.infer, columns))

    async def _store(self, rows: Sequence[BatchRollout], found: Columns) -> None:
        """Of tensor-parallel ranks, which found the same, one stores it."""
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
        """The block runs alone, with all on the device; from its end on a batch is waited for."""
        async with self._lock:
            self.policy_step.require_presence()
            yield self.policy_step
            self._idle_since_ns = time.monotonic_ns()

    @asynccontextmanager
    async def _aside(self, name: str) -> AsyncIterator[PolicyStep]:
        """The block's turn, which is neither training nor waiting for it."""
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
    """The stored rollouts must be those the controller knows, token for token."""
    for i, row in enumerate(rows):
        lengths = {name: len(cells[i]) for name, cells in columns.items() if name != SAMPLING}
        assert lengths.pop(PROMPT_IDS) == row.num_prompt_tokens, (row, PROMPT_IDS)
        assert set(lengths.values()) == {row.num_tokens}, (row, lengths)
