"""What a run leaves in its folder, and shows, at its end.

Owns: the summary's place among the results, and the commands that a user may type next. Does not
own: figures (`metrics/`) or exit codes (`main.py`). Invariant: a summary in the folder is that of a
run that came to its end there.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.config import Config
from llamarl.metrics.panel import render_summary, shorten
from llamarl.metrics.summary import SUMMARY_FILE, summarize


def show(config: Config, run_dir: str, summary: dict[str, Any], console: Console) -> None:
    """Print the table that ends a run, where its results lie, and what to try next."""
    paths = {"metrics": f"{run_dir}/metrics.jsonl", "timeline": f"{run_dir}/trace.json"}
    if "tensorboard" in config.metrics.trackers:
        paths = {"TensorBoard": f"{run_dir}/tensorboard", **paths}
    next_command = f"{_program('tensorboard')} --logdir {shorten(run_dir)}"
    if config.checkpoint.export:
        paths["checkpoint"] = f"{run_dir}/export"
        next_command = (
            f"{_program('llamarl')} evaluate --config-dir {shorten(config.recipe_dir)} "
            f"model.checkpoint={run_dir}/export"
        )
    render_summary(summary, paths, next_command, console)


def is_finished(config: Config, run_dir: str, state: dict[str, Any]) -> bool:
    """Whether a run saved as `state` has its whole result in the folder already."""
    is_trained = state.get("version") == config.num_steps or "solved" in state
    has_export = Path(run_dir, "export").is_dir() or not config.checkpoint.export
    return is_trained and has_export and Path(run_dir, SUMMARY_FILE).is_file()


def repeat_end(
    config: Config, run_dir: str, state: dict[str, Any], console: Console
) -> dict[str, Any]:
    """What a finished run showed at its end, worked out again from what it stored."""
    summary = summarize(run_dir)
    show(config, run_dir, summary, console)
    console.print("this run was finished before: nothing was started", highlight=False)
    show_why(config, state["version"], state.get("solved", ""), console)
    return summary


def show_why(config: Config, version: int, solved: str, console: Console) -> None:
    """Say why a run stopped before its last step, if it did: `solved` is the gate's."""
    if solved and version < config.num_steps:
        console.print(
            f"stopped at step {version} of {config.num_steps}: {solved} were answered with full "
            "marks, so nothing is left to learn from these prompts",
            highlight=False,
            soft_wrap=True,
        )


def command_to_go_on(command: Sequence[str], run_dir: str) -> str:
    """What to type so that the run in `run_dir`, started by `command`, goes on."""
    program, *arguments = command
    is_one = not {"--multirun", "-m"} & set(arguments)
    replaced = ("checkpoint.resume=", "run_dir=") if is_one else ("checkpoint.resume=",)
    kept = [argument for argument in arguments if not argument.startswith(replaced)]
    if is_one:
        kept.append(f"run_dir={shorten(run_dir)}")
    return shlex.join([_program(program), *kept, "checkpoint.resume=auto"])


def _program(name: str) -> str:
    """How the user, from here, calls a program of this environment."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else shorten(str(beside))
