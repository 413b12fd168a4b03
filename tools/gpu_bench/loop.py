"""The whole loop in one process: async against sync, over the same lengths."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from sections import Facts

from gpu_bench.setting import (
    RANDOM_REWARD,
    Setting,
    make_checkpoint,
    make_config,
    make_lengths,
)
from llamarl.cli.train import train
from llamarl.metrics.provenance import keep_nothing


def measure(setting: Setting) -> Iterator[Facts]:
    """Seconds of a step with staleness 0 and 1. One process and one GPU, so generator and trainer
    overlap only where neither fills it. Each run has a process of its own: torch 2.11 crashes where
    a second trainer is set up in one."""
    checkpoint = make_checkpoint(setting, setting.loop_model, has_weights=True)
    lengths = make_lengths(setting)
    figures = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for name, staleness in (("sync", 0), ("async", 1)):
            run = processes.submit(_run, setting, checkpoint, lengths, name, staleness)
            found = {f"{name}_{key}": value for key, value in run.result().items()}
            yield Facts(found)
            figures |= found
    yield Facts({"async_over_sync": figures["sync_step_s"] / figures["async_step_s"]})


def _run(
    setting: Setting, checkpoint: str, lengths: str, name: str, staleness: int
) -> dict[str, float]:
    run_dir = Path(setting.folder, name)
    run_dir.mkdir()
    is_cuda = setting.is_cuda
    config = make_config(
        setting,
        checkpoint,
        run={
            "run_dir": str(run_dir),
            "recipe_dir": str(RANDOM_REWARD),
            "num_steps": setting.loop_steps,
        },
        reward={"functions": ["task"]},
        cluster={"backend": "inline"},
        staleness={"max_staleness": staleness},
        # Within one process only shared memory leads from one executor to the other.
        weights={"transport": "shared_memory", "staging": "host" if is_cuda else "double_buffer"},
        sampling={
            "max_tokens": setting.loop_tokens,
            "rollouts_per_prompt": 8,
            "replay_lengths": lengths,
        },
        generator={
            "max_num_seqs": 64,
            "max_model_len": setting.loop_tokens + 32,
            "device": setting.device,
            "dtype": setting.dtype,
        },
        trainer={
            "groups_per_step": setting.loop_groups,
            "tokens_per_micro_batch": setting.micro_batch_tokens,
            "device": setting.device,
            "compute_dtype": setting.dtype,
            "lr": 1e-6,
        },
    )
    with open(os.devnull, "w") as nowhere:
        summary = asyncio.run(train(config, str(run_dir), Console(file=nowhere), keep_nothing))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    ends_s = [line["unix_s"] for line in steps]
    steps_s = [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]
    return {
        "step_s": statistics.median(steps_s),
        "tokens_per_s": summary["tokens_per_s"],
        "both_busy_share": summary["both_busy_share"],
        "trained_tokens": sum(line["tokens/trained"] for line in steps),
    }
