"""A generator that decodes while versions are published into it, and what its spans show."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

from llamarl.cluster.executor import parts_for
from llamarl.core.config import EmbeddedConfig, PlacementConfig, WeightsConfig
from llamarl.core.records import Columns, Request, Sampling
from llamarl.generator.specs import GeneratorSpec
from llamarl.generator.worker import GeneratorWorker
from llamarl.metrics.span import Span, SpanReader, Spans
from weights_bench.model import Model, config_json

PROMPT_TOKENS = 16


class NoStorage:
    """Takes rollouts and keeps nothing."""

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None: ...


class DecodingGenerator:
    """A real generator executor without weights; its spans go to `folder`."""

    def __init__(self, model: Model, folder: str, batch: int, context_tokens: int) -> None:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        text = json.dumps(config_json(model.architecture, model.dtype))
        (checkpoint / "config.json").write_text(text)
        self._vocab_size = model.architecture.vocab_size
        self._spans = Spans("generator-0", folder)
        self._max_tokens = context_tokens - PROMPT_TOKENS
        storage: Any = NoStorage()
        self._executor = GeneratorWorker(
            GeneratorSpec(
                replica=0,
                checkpoint=str(checkpoint),
                load_weights=False,
                config=EmbeddedConfig(
                    max_num_seqs=batch, max_model_len=context_tokens, dtype=model.dtype
                ),
                weights=WeightsConfig(),
                placement=PlacementConfig(),
                storage=storage,
                tokenizer="",
                run_id="bench",
                run_dir=folder,
            ),
            rank=0,
            num_ranks=1,
            spans=self._spans,
        )

    async def start(self) -> None:
        await self._executor.start()

    async def submit(self, num: int) -> None:
        """Queue rollouts as long as the context allows, and collect them until cancelled."""
        draw = random.Random(0)
        sampling = Sampling(max_tokens=self._max_tokens)
        requests = []
        for row in range(num):
            ids = tuple(draw.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS))
            requests.append(Request(row_id=row, prompt_ids=ids, sampling=sampling, seed=row))
        await self.ask("submit", requests)
        self._collecting = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        while True:
            await self.ask("collect")

    async def ask(self, name: str, *args: Any) -> Any:
        """A method of the executor."""
        return await getattr(self._executor, name)(*parts_for(0, args))

    async def close(self) -> None:
        self._collecting.cancel()
        await self._executor.close()
        self._spans.close()


def decode_spans(folder: str) -> list[Span]:
    """The decode steps so far, in order."""
    spans = list(SpanReader(Path(folder) / "generator-0.jsonl").read())
    return [span for span in spans if span.name == "decode"]


def longest_gap_s(steps: list[Span], start_ns: int, end_ns: int) -> float:
    """Longest time between two successive decode steps that touches the window [start, end].

    `steps` in order; NaN if there are not two.
    """
    gaps = [
        (after.start_ns - before.end_ns) / 1e9
        for before, after in itertools.pairwise(steps)
        if after.start_ns >= start_ns and before.end_ns <= end_ns
    ]
    return max(gaps, default=float("nan"))


def tokens_per_s(steps: list[Span], start_ns: int, end_ns: int) -> float:
    """Tokens of the window [start, end] per second; a step that it cuts counts in part."""
    first = bisect_left([step.end_ns for step in steps], start_ns)
    tokens = 0.0
    for step in steps[first:]:
        if step.start_ns >= end_ns:
            break
        inside_ns = min(step.end_ns, end_ns) - max(step.start_ns, start_ns)
        tokens += step.args["tokens"] * inside_ns / max(step.end_ns - step.start_ns, 1)
    return tokens / ((end_ns - start_ns) / 1e9)


def now_ns() -> int:
    """The clock of the spans as read back."""
    return time.time_ns()
