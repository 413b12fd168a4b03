"""One run of each side on the same recipe and the same cores, and what it took.

TRL's numbers are those of the recipe that llamarl composes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rivals
from harness import Values
from live_run import LiveRun, command, environment

from llamarl.core.config import Config
from llamarl.recipe.composition import compose, to_config
from peers_bench.processors import run_steps

START_LIMIT_S = 300.0  # of a run: imports, and its end
STEP_LIMIT_S = 300.0  # ten times what the slowest side takes
NUM_SKIPPED = 1  # first steps, of processor seconds: llamarl fills its pipeline in them
MICRO_BATCH = 128  # rollouts with tools; 64 takes TRL as long, 32 and 512 longer
PLAIN_MICRO_BATCH = 16  # without; 64 takes TRL 2 to 6 % longer
TIMED = ("metrics.live=false", "data.held_out=null")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of either side is given; `options` are llamarl's overrides of the recipe."""

    recipe: Path
    folder: Path
    num_cores: int
    num_steps: int
    seed: int
    options: Sequence[str] = field(default_factory=tuple)

    def overrides(self) -> list[str]:
        """Of the recipe, for this run."""
        return [*self.options, f"num_steps={self.num_steps}", f"seed={self.seed}"]

    def pin(self) -> None:
        """Keep this process, and those it starts, on the first cores."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.num_cores])


@dataclass(frozen=True)
class Trained:
    """What a run took, and the checkpoint it made."""

    values: Values
    checkpoint: Path


Side = Callable[[Run], Trained]


def run_llamarl(run: Run, options: Sequence[str] = ()) -> Trained:
    """The recipe as it stands but for `options`, in the order of the prompt file."""
    fixed = (*TIMED, "data.shuffle=false", *options)
    words = command(run.recipe, run.folder, *fixed, *run.overrides())
    return Trained(_timed(run, words, environment()), run.folder / "export")


def run_trl(run: Run, *, num_processes: int = 1, are_calls_gathered: bool = False) -> Trained:
    """GRPOTrainer with a thread per core, or with `num_processes` of one thread each."""
    run.folder.mkdir()
    config = to_config(compose(run.recipe, run.overrides()))
    path = run.folder / "job.json"
    path.write_text(json.dumps(job_of(config, run, num_processes, are_calls_gathered)))
    launcher = [*TORCHRUN, f"--nproc-per-node={num_processes}"] if num_processes > 1 else []
    words = [str(rivals.PYTHON), *launcher, "-m", "peers_bench.trl_program", str(path)]
    # Threads that spin while they wait take several times as long beside any other process.
    variables = rivals.environment(run.num_cores // num_processes) | {"OMP_WAIT_POLICY": "passive"}
    values = _timed(run, words, variables)
    checkpoint = run.folder / "checkpoint"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.recipe / "checkpoint" / name, checkpoint)
    return Trained(values, checkpoint)


def own_ways(num_cores: int, *, is_plain: bool) -> dict[str, Side]:
    """llamarl's ways to use these cores: plain training takes the trainer longest."""
    ways: dict[str, Side] = {"llamarl": run_llamarl}
    if is_plain and num_cores > 1:
        ways[f"llamarl, {num_cores} trainer ranks"] = partial(
            run_llamarl, options=(f"trainer.num_ranks={num_cores}", "trainer.reshard_after=step")
        )
    return ways


def trl_ways(num_cores: int, *, are_calls_gathered: bool) -> dict[str, Side]:
    """TRL's ways to use these cores, with its own loop for tools or with the one that gathers."""
    name = "TRL, calls gathered" if are_calls_gathered else "TRL"
    ways: dict[str, Side] = {name: partial(run_trl, are_calls_gathered=are_calls_gathered)}
    if num_cores > 1:
        ways[f"{name}, {num_cores} processes"] = partial(
            run_trl, num_processes=num_cores, are_calls_gathered=are_calls_gathered
        )
    return ways


def _timed(run: Run, words: list[str], variables: dict[str, str]) -> Values:
    found = LiveRun(run.folder)
    limit_s = START_LIMIT_S + STEP_LIMIT_S * run.num_steps
    busy_s = run_steps(words, variables, found.metrics, NUM_SKIPPED, begin=run.pin, limit_s=limit_s)
    tokens = sum(step["trainer/num_tokens"] for step in found.steps)
    return {
        "step_s": statistics.mean(found.steps_s),
        "processor_s": sum(busy_s.values()),
        "tokens_per_s": tokens / sum(found.steps_s),
    }


def job_of(
    config: Config, run: Run, num_processes: int, are_calls_gathered: bool
) -> dict[str, Any]:
    """The fields of `trl_program.Job`."""
    trainer, sampling = config.trainer, config.sampling
    replayed = sampling.replay_lengths
    return {
        "recipe": str(run.recipe),
        "out": str(run.folder),
        "num_steps": config.num_steps,
        "seed": config.seed,
        "num_prompts": trainer.groups_per_step,
        "num_generations": sampling.rollouts_per_prompt,
        "micro_batch": PLAIN_MICRO_BATCH if replayed else MICRO_BATCH,
        "num_processes": num_processes,
        "max_tokens": sampling.max_tokens,
        "max_turns": config.environment.max_turns,
        "temperature": sampling.temperature,
        "lr": trainer.lr,
        "warmup_steps": trainer.warmup_steps,
        "betas": list(trainer.betas),
        "eps": trainer.eps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "pattern": config.reward.pattern,
        "are_calls_gathered": are_calls_gathered,
        "lengths": json.loads((run.recipe / replayed).read_text()) if replayed else [],
    }
