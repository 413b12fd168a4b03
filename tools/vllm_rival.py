"""vLLM on a benchmark's job, in a process of its own: its environment must not touch the others.

Three ways, so that the fastest can be taken: vLLM's own `LLM` class with weights packed as it
likes, without and with the log-probs that reinforcement learning needs, and the engine that llamarl
makes of it, which gives them too. Random weights, one thread, no compilation (it needs a compiler).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from weights_bench.model import config_json
from weights_bench.processes import Remote

from llamarl.core.config import VllmConfig
from llamarl.core.records import Request, Sampling
from llamarl.generator.vllm.limits import check_installed
from llamarl.generator.vllm.settings import set_environment
from llamarl.model.architecture import Architecture

LLM, LLM_LOGPROBS, ENGINE = "vllm", "vllm_with_logprobs", "llamarl_vllm"
WAYS = (LLM, LLM_LOGPROBS, ENGINE)
WITH_LOGPROBS = (LLM_LOGPROBS, ENGINE)
Run = Callable[[list[list[int]], int, bool], int]  # prompts, length, log-probs: tokens written
BLOCK_TOKENS = 32
KV_CACHE_BYTES = 1 << 30


def why_not() -> str | None:
    """Why vLLM cannot be measured here, if so."""
    try:
        check_installed()
    except ValueError as error:
        return str(error)
    return None


class VllmRival:
    """vLLM in two child processes; `folder` is scratch space of its own.

    `slots` rollouts run together, each of at most `context` tokens.
    """

    def __init__(
        self, architecture: Architecture, dtype: str, slots: int, context: int, folder: Path
    ) -> None:
        folder.mkdir()
        text = json.dumps(config_json(architecture, dtype))
        (folder / "config.json").write_text(text)
        self._loop = asyncio.new_event_loop()

        async def make() -> dict[bool, Remote]:
            found = {}
            for is_engine in (False, True):
                found[is_engine] = Remote(_Job, dtype, is_engine, slots, context, str(folder))
                await found[is_engine].call("start")
            return found

        self._remotes = self._loop.run_until_complete(make())

    def seconds(self, way: str, prompts: list[list[int]], length: int) -> float:
        """Wall time to sample `length` tokens for every prompt, by the clock of the child."""
        call = self._remotes[way == ENGINE].call("run", prompts, length, way == LLM_LOGPROBS)
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        """End the children."""
        for remote in self._remotes.values():
            remote.close()
        self._loop.close()


class _Job:
    """What a child process holds: vLLM's LLM, or llamarl's engine over it."""

    def __init__(self, dtype: str, is_engine: bool, slots: int, context: int, folder: str) -> None:
        self._dtype, self._is_engine = dtype, is_engine
        self._slots, self._context, self._folder = slots, context, folder
        self._num_runs = 0

    def start(self) -> None:
        set_environment("cpu")
        self._run = self._make_engine() if self._is_engine else self._make_llm()

    def run(self, prompts: list[list[int]], length: int, with_logprobs: bool) -> float:
        self._num_runs += 1
        start_s = time.perf_counter()
        num_tokens = self._run(prompts, length, with_logprobs)
        took_s = time.perf_counter() - start_s
        if num_tokens != len(prompts) * length:
            raise RuntimeError(f"vLLM wrote {num_tokens} tokens, asked for {length} per prompt")
        return took_s

    def _make_llm(self) -> Run:
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=self._folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=self._dtype,
            max_model_len=self._context,
            max_num_seqs=self._slots,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=False,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
        )

        def run(prompts: list[list[int]], length: int, with_logprobs: bool) -> int:
            sampling = SamplingParams(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if with_logprobs else None,
            )
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(inputs, sampling, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    def _make_engine(self) -> Run:
        import torch

        from llamarl.generator.vllm.engine import VllmEngine

        config = VllmConfig(
            max_num_seqs=self._slots,
            max_model_len=self._context,
            dtype=self._dtype,
            kv_cache_bytes=KV_CACHE_BYTES,
            block_size=BLOCK_TOKENS,
        )
        engine = VllmEngine(
            self._folder, config, rank=0, num_ranks=1, rendezvous="", run_id="bench"
        )
        flat = torch.randn(engine.memory.num_elements).mul_(0.02).to(engine.memory.dtype)
        engine.commit(engine.process_weights(flat), 0)

        def run(prompts: list[list[int]], length: int, with_logprobs: bool) -> int:
            # A new version label keeps a run from using the prompts' cache of the one before.
            engine.version = self._num_runs
            for row, prompt in enumerate(prompts):
                sampling = Sampling(max_tokens=length)
                engine.submit(
                    Request(row_id=row, prompt_ids=tuple(prompt), sampling=sampling, seed=row)
                )
            num_tokens = 0
            while engine.has_work:
                engine.admit()
                num_tokens += sum(len(item.written.ids) for item in engine.decode())
            return num_tokens

        return run
