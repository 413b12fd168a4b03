"""What a run shows at its end, and the commands that a user may type next.

Owns: the order of the results, and whether a resumed run has ended before. Does not own: figures
(`summary.py`) or exit codes (`main.py`). Invariant: a summary in the folder is that of a run that
came to its end there.
"""

import logging
import shlex
import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.config import Config
from llamarl.metrics.rendering import render_summary, shorten
from llamarl.metrics.summary import SUMMARY_FILE, summarize

log = logging.getLogger(__name__)

LOG_WIDTH = 84


def show_end(
    config: Config, run_dir: str, summary: dict[str, Any], state: dict[str, Any], console: Console
) -> None:
    """Print the table that ends a run, the paths of its results, what to try next and, for a run
    that stopped before its last step, why: `state` has its version and, if so, what is "solved"."""
    paths = {"metrics": f"{run_dir}/metrics.jsonl", "timeline": f"{run_dir}/trace.json"}
    if "tensorboard" in config.metrics.trackers:
        paths = {"TensorBoard": f"{run_dir}/tensorboard", **paths}
    next_command = f"{find_program('tensorboard')} --logdir {shorten(run_dir)}"
    if config.checkpoint.export:
        paths["checkpoint"] = f"{run_dir}/export"
    if config.checkpoint.export and config.data.held_out is not None:
        next_command = (
            f"{find_program('llamarl')} evaluate --config-dir {shorten(config.recipe_dir)} "
            f"model.checkpoint={run_dir}/export"
        )
    text = StringIO()
    render_summary(summary, paths, next_command, Console(file=text, width=LOG_WIDTH))
    log.info("%s", text.getvalue())
    render_summary(summary, paths, next_command, console)
    if state.get("solved") and state["version"] < config.num_steps:
        console.print(
            f"stopped at step {state['version']} of {config.num_steps}: {state['solved']} were "
            "answered with full marks, so nothing is left to learn from these prompts",
            highlight=False,
            soft_wrap=True,
        )


def is_finished(config: Config, run_dir: str, state: dict[str, Any]) -> bool:
    """True if the run whose checkpoint holds `state` has left all its results in the folder."""
    is_trained = state.get("version") == config.num_steps or "solved" in state
    has_export = Path(run_dir, "export").is_dir() or not config.checkpoint.export
    return is_trained and has_export and Path(run_dir, SUMMARY_FILE).is_file()


def show_finished_run(
    config: Config, run_dir: str, state: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Show again what a finished run showed at its end; returns its summary, computed again."""
    summary = summarize(run_dir)
    show_end(config, run_dir, summary, state, console)
    console.print("this run had finished before: nothing was started", highlight=False)
    return summary


def resume_command(command: Sequence[str], run_dir: str) -> str:
    """The command that resumes the run in `run_dir`, which `command` started."""
    program, *arguments = command
    is_single = not {"--multirun", "-m"} & set(arguments)
    replaced = ("checkpoint.resume=", "run_dir=") if is_single else ("checkpoint.resume=",)
    kept = [argument for argument in arguments if not argument.startswith(replaced)]
    if is_single:
        kept.append(f"run_dir={shorten(run_dir)}")
    return shlex.join([find_program(program), *kept, "checkpoint.resume=auto"])


def find_program(name: str) -> str:
    """How to call a program of this environment from the working folder, with or without it on
    PATH."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else shorten(str(beside))
