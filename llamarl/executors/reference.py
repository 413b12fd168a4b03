"""The frozen model that a KL term compares with.

Owns: `ref_logprobs`. Does not own: the KL term (`algorithms/`). Invariant: its weights are the
starting checkpoint's for the whole run, held in the trainer's compute dtype, whole on every rank;
ranks share out the rows and never talk to each other.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from llamarl.config import SamplingConfig, TrainerConfig
from llamarl.data.micro_batch import micro_batch
from llamarl.data.packing import pack
from llamarl.executors.compute import ComputeThread
from llamarl.metrics.span import Spans
from llamarl.models import hf
from llamarl.models.architecture import read_architecture
from llamarl.models.process_group import compute_device
from llamarl.models.transformer import Transformer
from llamarl.protocols import Storage
from llamarl.types import PROMPT_IDS, REF_LOGPROBS, RESPONSE_IDS, Columns


class ReferenceExecutor:
    """protocols.Reference for one rank: every `num_ranks`-th row is its own."""

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        spans: Spans,
        checkpoint: str,
        config: TrainerConfig,
        sampling: SamplingConfig,
        storage: Storage,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._spans = spans
        self._checkpoint = checkpoint
        self._config = config
        self._sampling = sampling
        self._storage = storage
        self._compute = ComputeThread(f"reference-{rank}")
        self._idle_since_ns = time.monotonic_ns()

    async def start(self) -> None:
        """Load the model. ValueError if the checkpoint is missing or does not fit."""
        await self._compute.run(self._build)

    async def close(self) -> None:
        """End the compute thread."""
        self._compute.close()

    async def infer(self, row_ids: list[int]) -> None:
        """Write `ref_logprobs`, at the sampling temperature, of this rank's share of the rows."""
        mine = row_ids[self._rank :: self._num_ranks]
        if not mine:
            return
        columns = await self._storage.read(mine, [PROMPT_IDS, RESPONSE_IDS])
        self._spans.record("rollouts", self._idle_since_ns, time.monotonic_ns(), "wait")
        num_tokens = sum(len(ids) for ids in columns[RESPONSE_IDS])
        with self._spans.span("infer", tokens=num_tokens):
            logprobs = await self._compute.run(lambda: self._infer(columns))
        await self._storage.write(mine, {REF_LOGPROBS: logprobs})
        self._idle_since_ns = time.monotonic_ns()

    def _build(self) -> None:
        self._device = compute_device(self._config.device, "trainer.device")
        with torch.device("meta"):
            model = Transformer(read_architecture(self._checkpoint))
        model = model.to(getattr(torch, self._config.compute_dtype)).requires_grad_(False)
        self._model = model.to_empty(device=self._device).eval()
        hf.load_into(dict(self._model.named_parameters()), self._checkpoint)

    @torch.no_grad()
    def _infer(self, columns: Columns) -> list[np.ndarray]:
        """log pi_ref of every response, float32, in the order of `columns`."""
        lengths = [
            len(prompt) + len(response)
            for prompt, response in zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        ]
        logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(lengths)
        for indices in pack(lengths, 1, self._config.tokens_per_micro_batch)[0]:
            packed = micro_batch(columns, indices, self._device)
            stats = self._model(
                packed.token_ids, packed.lengths, packed.targets, self._sampling.temperature
            )
            values = stats.logprobs[packed.response].float().cpu()
            for i, part in zip(indices, values.split(list(packed.response_lengths)), strict=True):
                logprobs[i] = part.numpy()
        return logprobs
