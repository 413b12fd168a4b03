"""The trainer's model FLOP utilisation and peak memory."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sections import Facts

from gpu_bench.generation import against_forecast
from gpu_bench.setting import (
    Setting,
    gpu_kind,
    make_checkpoint,
    make_config,
    num_parameters,
    synchronize,
)
from llamarl.core.groups import Batch, BatchRollout
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
)
from llamarl.metrics.span import Spans
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.trainer.packing import pack
from llamarl.trainer.specs import TrainerSpec
from llamarl.trainer.worker import TrainerWorker

NUM_STEPS = 5  # the first two are not measured


class MemoryStorage:
    """Rows of one length, always the same ones."""

    def __init__(self, setting: Setting, vocab_size: int) -> None:
        random = np.random.default_rng(0)
        num_tokens = setting.train_tokens - setting.prompt_tokens
        self._cells = {
            PROMPT_IDS: random.integers(0, vocab_size, setting.prompt_tokens).astype(np.int32),
            RESPONSE_IDS: random.integers(0, vocab_size, num_tokens).astype(np.int32),
            GENERATOR_LOGPROBS: np.full(num_tokens, -math.log(vocab_size), np.float32),
            TOKEN_VERSIONS: np.zeros(num_tokens, np.int32),
            SAMPLING: np.array([1, 0, 1, num_tokens, 0, 1], np.float64),
        }

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        return {name: [self._cells[name]] * len(row_ids) for name in names}

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        """Nothing reads it."""


def measure(setting: Setting) -> Iterator[Facts]:
    """Tokens per second, the share of the peak FLOPs, and on CUDA the peak memory."""
    checkpoint = make_checkpoint(setting, setting.model, has_weights=True)
    config = make_config(setting, checkpoint, trainer={"lr": 1e-6, "reshard_after": "backward"})
    architecture = read_architecture(checkpoint)
    steps_s = asyncio.run(_train(setting, config, checkpoint, architecture.vocab_size))
    num_tokens = setting.train_rows * setting.train_tokens
    tokens_per_s = num_tokens / statistics.median(steps_s)
    yield Facts({"tokens_per_s": tokens_per_s, "step_s": statistics.median(steps_s)})
    if not setting.is_cuda:
        return
    _, gpu = gpu_kind(setting)
    flops = flops_per_token(architecture, setting.train_tokens)
    yield Facts({"mfu": tokens_per_s * flops / gpu.flops[config.trainer.compute_dtype]})
    peak_bytes = torch.cuda.max_memory_allocated()
    yield Facts(against_forecast(config, checkpoint, "trainer", peak_bytes))


def flops_per_token(architecture: Architecture, num_tokens: int) -> float:
    """Of forward and backward: two per weight and token forward (a tied matrix counts once, as
    head), and causal attention over rows of `num_tokens`; twice that backward."""
    width = architecture.num_heads * architecture.head_dim
    attention = (
        2 * architecture.num_layers * width * num_tokens
    )  # two products, half of them masked
    return 3 * (2 * num_parameters(architecture) + attention)


async def _train(setting: Setting, config: object, checkpoint: str, vocab_size: int) -> list[float]:
    rendezvous = Path(setting.folder, "rendezvous-training")
    rendezvous.unlink(missing_ok=True)
    trainer = TrainerWorker(
        TrainerSpec(
            checkpoint=checkpoint,
            rendezvous=str(rendezvous),
            config=config.trainer,
            algorithm=config.algorithm,
            sampling=config.sampling,
            weights=config.weights,
            placement=config.placement,
            run_dir=setting.folder,
            num_steps=NUM_STEPS,
            seed=0,
            storage=MemoryStorage(setting, vocab_size),
        ),
        rank=0,
        num_ranks=1,
        spans=Spans("trainer", None),
    )
    await trainer.start()
    try:
        return [await _step(setting, trainer, version) for version in range(NUM_STEPS)][2:]
    finally:
        await trainer.close()


async def _step(setting: Setting, trainer: TrainerWorker, version: int) -> float:
    rows = tuple(
        BatchRollout(
            row_id=row,
            group_id=row // 8,
            num_prompt_tokens=setting.prompt_tokens,
            num_tokens=setting.train_tokens - setting.prompt_tokens,
            num_generated=setting.train_tokens - setting.prompt_tokens,
            advantage=(-1.0) ** row,
            oldest_version=0,
        )
        for row in range(setting.train_rows)
    )
    lengths = [setting.train_tokens] * len(rows)
    assignment = pack(lengths, 1, setting.micro_batch_tokens)
    start_s = time.perf_counter()
    await trainer.accumulate(Batch(version=version, rows=rows, assignment=assignment))
    await trainer.step()
    synchronize(setting)
    return time.perf_counter() - start_s
