"""A frozen model: the reference that a KL term compares with, or a teacher of the recipe's own.

Its weights are its checkpoint's for the whole run, held in the trainer's compute dtype and laid
out over as many ranks as the trainer's, so that a reference fits wherever the trainer does."""

import asyncio
import time
from contextlib import ExitStack

import numpy as np
import torch

from llamarl.core.compute import ComputeThread
from llamarl.core.device.devices import compute_device, use_device
from llamarl.core.faces import Processor, Worker
from llamarl.core.process_group import join, largest, leave
from llamarl.core.records import (
    KEPT_IDS,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    Columns,
    StageItem,
    StageResult,
)
from llamarl.metrics.span import Spans
from llamarl.storage.client import RecordingStore
from llamarl.trainer.packing import pack
from llamarl.trainer.parallel import load_model, make_mesh, reshard
from llamarl.trainer.passes import infer
from llamarl.trainer.specs import ReferenceSpec


class ReferenceWorker(Worker, Processor):
    """The worker of a frozen model, which serves calls in order of arrival.

    A single rank forms no group: with `cluster=inline` the trainer's is in the same process."""

    def __init__(self, spec: ReferenceSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec = spec
        self._storage = RecordingStore(spec.storage, spans)
        self._rank, self._num_ranks, self._spans = rank, num_ranks, spans
        self._data_rank, self._tensor_rank = divmod(rank, spec.config.tensor_parallel)
        self._config = spec.config
        self._compute = ComputeThread(f"{spec.column}-{rank}")
        self._resources = ExitStack()
        self._lock = asyncio.Lock()  # collectives must start in the same order on all ranks
        self._idle_since_ns = time.monotonic_ns()

    async def start(self) -> None:
        """Join the other ranks and load this rank's slices of the checkpoint.

        Raises ValueError if the checkpoint is missing or does not fit."""
        await self._compute.run(self._build)

    async def close(self) -> None:
        """Leave the process group and end the compute thread."""
        await self._compute.run(self._resources.close)
        self._compute.close()

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        """Write the log-probs, at the sampling temperature, of this data rank's share of the
        rollouts. Returns no results."""
        row_ids = [row_id for row_ids, _ in items for row_id in row_ids]
        mine = row_ids[self._data_rank :: self._config.num_data_ranks]
        async with self._lock:
            names = [PROMPT_IDS, RESPONSE_IDS, *[ROUTED_EXPERTS] * self._spec.replays_routing]
            names += [KEPT_IDS] * (self._spec.sampling.top_k > 0)
            columns = await self._storage.read(mine, names)
            self._spans.record("rollouts", self._idle_since_ns, time.monotonic_ns(), "wait")
            num_tokens = sum(len(ids) for ids in columns[RESPONSE_IDS])
            with self._spans.span("infer", tokens=num_tokens):
                logprobs = await self._compute.run(lambda: self._infer(columns))
            if mine and self._tensor_rank == 0:
                await self._storage.write(mine, {self._spec.column: logprobs})
            self._idle_since_ns = time.monotonic_ns()
        return []

    def _build(self) -> None:
        self._device = compute_device(self._config.device, "trainer.device")
        use_device(self._device)
        mesh = None
        if self._num_ranks > 1:
            join(self._spec.rendezvous, self._rank, self._num_ranks, self._device)
            self._resources.callback(leave)
            mesh = make_mesh(self._device.type, self._config)
        dtype = getattr(torch, self._config.compute_dtype)
        model = load_model(self._spec.checkpoint, self._config, self._device, mesh, dtype)
        self._model = model.requires_grad_(False)

    def _infer(self, columns: Columns) -> list[np.ndarray]:
        """Return log pi_ref of every response, float32, in the order of `columns`."""
        pairs = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        (packed,) = pack(lengths, 1, self._config.tokens_per_micro_batch)
        num = len(packed) if self._num_ranks == 1 else largest(len(packed))
        packed += ((),) * (num - len(packed))  # all ranks take part in every gather
        found = infer(self._model, columns, packed, self._spec.sampling.temperature, self._device)
        reshard(self._model)
        return [found[place] for place in range(len(lengths))]
