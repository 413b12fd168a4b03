"""One real run, a training or an evaluation, in processes of its own, and what it leaves behind.

A run that fails ends the benchmark with all that the run wrote.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import ROOT

RECIPE = ROOT / "recipes" / "quickstart"
QUIET = ("metrics.live=false", "checkpoint.export=false", "evaluation.every_steps=0")
INLINE = "cluster=inline"  # all in one process: half the start, and no figure of a real run
PROGRAM = ("-m", "llamarl")


@dataclass(frozen=True)
class LiveRun:
    """A finished run."""

    run_dir: Path

    @property
    def metrics(self) -> Path:
        """The file with a line per step."""
        return self.run_dir / "metrics.jsonl"

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says of each training step."""
        lines = map(json.loads, self.metrics.read_text().splitlines())
        return [line for line in lines if "time/step_s" in line]

    @cached_property
    def steps_s(self) -> list[float]:
        """Seconds of each training step."""
        return [step["time/step_s"] for step in self.steps]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found


def command(
    recipe: Path, run_dir: Path, *options: str, program: Sequence[str] = PROGRAM
) -> list[str]:
    """What trains this recipe into this folder."""
    train = ("train", f"--config-dir={recipe}", f"run_dir={run_dir}")
    return [sys.executable, *program, *train, *options]


def evaluate(recipe: Path, checkpoint: Path, run_dir: Path, *more: str) -> float:
    """Greedy accuracy of a checkpoint on all of the recipe's held-out prompts. SystemExit with what
    the run wrote if it fails."""
    options = (f"--config-dir={recipe}", f"model.checkpoint={checkpoint}", f"run_dir={run_dir}")
    finish([sys.executable, *PROGRAM, "evaluate", *options, "metrics.live=false", *more])
    lines = [line for path in run_dir.glob("archive/*.jsonl") for line in path.open()]
    return statistics.mean(json.loads(line)["correct"] for line in lines)


def environment() -> dict[str, str]:
    """One thread per process; modules of the repository and of its tools."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def train(
    recipe: Path,
    run_dir: Path,
    *options: str,
    program: Sequence[str] = PROGRAM,
    begin: Callable[[], None] | None = None,
) -> LiveRun:
    """Train once; `begin` is called in the new process. SystemExit with its output if it fails."""
    finish(command(recipe, run_dir, *options, program=program), begin)
    return LiveRun(run_dir)


def finish(words: list[str], begin: Callable[[], None] | None = None) -> None:
    """Run a command; `begin` is called in its process. SystemExit with its output if it fails."""
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, preexec_fn=begin
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
