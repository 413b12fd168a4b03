"""Tokens per second of the embedded engine, and its peak memory, against bound and planner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from sections import Facts

from gpu_bench.setting import (
    Setting,
    gpu_kind,
    make_checkpoint,
    make_config,
    num_parameters,
    synchronize,
)
from llamarl.controller.memory import forecast_memory
from llamarl.core.config import WeightsConfig
from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.model.architecture import read_architecture
from llamarl.publish.target import WeightBuffer


def measure(setting: Setting) -> Iterator[Facts]:
    """Per batch size: tokens per second, and the share of what memory bandwidth allows.

    The bound reads, for each token of the batch, all weights once and the keys and values of every
    rollout at its mean length.
    """
    checkpoint = make_checkpoint(setting, setting.model, has_weights=False)
    for batch in setting.batches:
        is_eager = not setting.is_cuda
        yield Facts(_measure_batch(setting, checkpoint, batch, enforce_eager=is_eager))
    if setting.is_cuda:
        batch = setting.batches[-2]
        eager = _measure_batch(setting, checkpoint, batch, enforce_eager=True)
        yield Facts({f"tokens_per_s_{batch}_without_graphs": eager[f"tokens_per_s_{batch}"]})


def memory(setting: Setting) -> Iterator[Facts]:
    """Peak memory of a full batch with live and staging weights, against the forecast."""
    checkpoint = make_checkpoint(setting, setting.model, has_weights=False)
    _measure_batch(setting, checkpoint, max(setting.batches), enforce_eager=False)
    peak_bytes = torch.cuda.max_memory_allocated()
    config = make_config(setting, checkpoint)
    yield Facts(against_forecast(config, checkpoint, "generator", peak_bytes))


def against_forecast(config: object, checkpoint: str, executor: str, peak_bytes: int) -> dict:
    """What was allocated at most against the forecast's kinds, without reserve and snapshot: no
    publish is late here."""
    ranks = forecast_memory(config, read_architecture(checkpoint)).ranks
    (rank,) = (rank for rank in ranks if rank.executor == executor)
    kinds = {k: v for k, v in rank.bytes_by_kind.items() if k not in ("reserve", "snapshot")}
    planned_bytes = sum(kinds.values())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        f"{executor}_peak_bytes": peak_bytes,
        f"{executor}_planned_bytes": planned_bytes,
        f"{executor}_error": peak_bytes / planned_bytes - 1,
        f"{executor}_used_of_gpu_bytes": total_bytes - free_bytes,
        f"{executor}_planned_with_reserve_bytes": rank.total_bytes,
    } | {f"{executor}_planned_{kind}_bytes": value for kind, value in kinds.items()}


def _measure_batch(
    setting: Setting, checkpoint: str, batch: int, *, enforce_eager: bool
) -> dict[str, float]:
    config = make_config(setting, checkpoint, generator={"enforce_eager": enforce_eager})
    architecture = read_architecture(checkpoint)
    engine = EmbeddedEngine(architecture, config.generator)
    weight_buffer = WeightBuffer(
        engine.memory, WeightsConfig(), replica=0, rank=0, run_id="bench", device=setting.device
    )
    weight_buffer.active.normal_(0, 0.02)
    engine.commit(engine.process_weights(weight_buffer.active), 0)
    _write(setting, engine, batch, first_row=0)  # captures the graphs
    engine.forget_prompts()
    synchronize(setting)
    prefill_s, decode_s = _write(setting, engine, batch, first_row=batch)
    weight_buffer.close()
    _, gpu = gpu_kind(setting)
    item = engine.memory.dtype.itemsize
    kv_bytes = (
        2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * item
    )
    mean_tokens = setting.prompt_tokens + setting.new_tokens / 2
    read_bytes = num_parameters(architecture) * item + batch * mean_tokens * kv_bytes
    tokens_per_s = batch * (setting.new_tokens - 1) / decode_s
    bound = batch * gpu.memory_bytes_per_s / read_bytes
    return {
        f"tokens_per_s_{batch}": tokens_per_s,
        f"bound_tokens_per_s_{batch}": bound,
        f"share_of_bound_{batch}": tokens_per_s / bound,
        f"prefill_tokens_per_s_{batch}": batch * setting.prompt_tokens / prefill_s,
    }


def _write(
    setting: Setting, engine: EmbeddedEngine, batch: int, first_row: int
) -> tuple[float, float]:
    """Seconds of the prefill with the first token, and of the other tokens."""
    random = torch.Generator().manual_seed(first_row)
    shape = (batch, setting.prompt_tokens)
    prompts = torch.randint(0, engine.architecture.vocab_size, shape, generator=random).tolist()
    sampling = Sampling(max_tokens=setting.new_tokens)
    for row, prompt in enumerate(prompts, first_row):
        engine.submit(Request(row_id=row, prompt_ids=tuple(prompt), sampling=sampling, seed=row))
    start_s = time.perf_counter()
    engine.step()
    synchronize(setting)
    middle_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    synchronize(setting)
    return middle_s - start_s, time.perf_counter() - middle_s
