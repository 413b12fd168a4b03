"""The command line: a recipe is composed, a job runs it.

Owns: commands, exit codes, how errors look. Does not own: how a recipe is composed
(`composition.py`), jobs. Invariant: a mistake of the user's ends in one line.

Exit codes: 0 done, 1 the run failed (with its traceback), 2 the user must change something (one
line), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from llamarl import jobs
from llamarl.cluster import GroupLost, whole_process
from llamarl.composition import DictConfig, for_each_config, to_config, to_yaml
from llamarl.config import Config
from llamarl.metrics.provenance import record_provenance

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
Job = Callable[[Config, str, Console, jobs.Record], Coroutine[Any, Any, Any] | None]
JOBS: dict[str, Job] = {"train": jobs.train, "evaluate": jobs.evaluate}
COMMANDS = {
    "train": "fine-tune a checkpoint by asynchronous RL",
    "evaluate": "score a checkpoint on held-out prompts",
    "plan": "say, on this CPU, whether a recipe fits its GPUs and how long a step takes",
    "launch": "print what starts a recipe on cluster.scheduler",
    "worker": "serve one host of a run that is started elsewhere (worker --help)",
}

USAGE = """usage: llamarl COMMAND --config-dir RECIPE [--config-name run] [key=value ...]

commands:
{commands}

options:
  --config-dir RECIPE    folder of the recipe; its run.yaml is read unless --config-name says else
  --cfg job              print the composed config and stop
  --multirun             run every combination of comma-separated values (train, evaluate)
{plan_options}
  --help                 this text; after a command, the recipe's keys

example: llamarl train --config-dir recipes/quickstart trainer.lr=1e-4
"""
PLAN_OPTIONS = {  # name of the option and of its value, what it does
    "json": ("FILE", "plan: write the figures as JSON"),
    "html": ("FILE", "plan: write a timeline and a memory chart as one page"),
    "trace": ("RUN", "plan: take executor times from this finished run's folder"),
    "sweep": ("", "plan: try other splits of the GPUs between trainer and generators"),
}


def main() -> None:
    """Entry point of the `llamarl` command."""
    with whole_process():
        try:
            _main()
        finally:
            gc.freeze()  # else the interpreter's end looks at all that was imported


def _main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return
    if command not in COMMANDS:
        _fail(f"the command must be one of {', '.join(COMMANDS)}, got {command!r}")
    if command == "worker":
        return _serve(arguments)
    job, composed_arguments = _choose(command, arguments)
    program = f"llamarl {command}"
    try:
        for_each_config(program, composed_arguments, partial(_run, job, [program, *arguments]))
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("llamarl: interrupted\n")
        sys.exit(130)
    except OSError as error:  # of Hydra, which makes the folder
        _fail(f"run_dir must be a folder that can be written to, got {error}")


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{words}" for name, words in COMMANDS.items()]
    options = [
        f"  --{f'{name} {value}':<21}{words}" for name, (value, words) in PLAN_OPTIONS.items()
    ]
    return USAGE.format(commands="\n".join(lines), plan_options="\n".join(options))


def _serve(arguments: list[str]) -> None:
    """A worker has no recipe: the run that attaches to it brings the config."""
    from llamarl.cluster import worker

    try:
        worker.main(arguments)
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("llamarl: interrupted\n")
        sys.exit(130)


def _choose(command: str, arguments: list[str]) -> tuple[Job, list[str]]:
    """The job, and the arguments that are Hydra's.

    `plan` and `launch` make no run folder: Hydra is pointed at the folder that is there.
    """
    if command in JOBS:
        return JOBS[command], arguments
    if {"--multirun", "-m"} & set(arguments):
        _fail(f"--multirun must come with train or evaluate, got {command}")
    if command == "launch":
        return partial(jobs.launch, command=arguments), [*arguments, "hydra.run.dir=."]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, (value, _) in PLAN_OPTIONS.items():
        parser.add_argument(f"--{name}", action="store" if value else "store_true")
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        _fail(f"{error.argument_name} must name a file or folder, got nothing ({error.message})")
    return partial(jobs.plan, **vars(options)), [*rest, "hydra.run.dir=."]


def _run(job: Job, command: list[str], composed: DictConfig, run_dir: str) -> None:
    """One job; a multirun calls this once per combination."""
    is_run = job in JOBS.values()
    try:
        config = to_config(composed)
        record = partial(record_provenance, run_dir, command, to_yaml(composed))
        console = Console()
        handler = RichHandler(console=console, show_path=False)  # never tears the live display
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
        work = job(config, run_dir, console, record)
        if work is not None:
            asyncio.run(work)
    except asyncio.CancelledError:
        sys.stderr.write("llamarl: terminated\n")
        sys.exit(143)
    except Exception as error:  # noqa: BLE001 - the process's last stop: shown, exit code not 0
        _report(error, run_dir if is_run else None)


def _report(error: Exception, run_dir: str | None) -> None:
    """Say what ended the job and exit.

    A ValueError or a full disk is the user's to mend: one line. But a ValueError out of a group
    comes from the running loop, where nothing the user wrote is left to check: a bug, shown whole.
    """
    cause = _first(error)
    if run_dir is not None and isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
        _fail(f"run_dir must be on a disk with room to write to, got {cause} in {run_dir}")
    if cause is error and isinstance(cause, ValueError):
        if run_dir is not None:
            with contextlib.suppress(OSError):
                os.rmdir(run_dir)  # Hydra made it; it goes if nothing is in it
        _fail(str(cause))
    remote = getattr(cause, "__notes__", [])
    sys.stderr.write("\n".join(remote) + "\n" if remote else "")
    if not remote:  # else its traceback stands in the note, and the way here says nothing more
        traceback.print_exception(cause)
    if isinstance(cause, GroupLost):
        sys.stderr.write(f"llamarl: its log may say why: {run_dir}/logs\n")
    sys.exit(1)


def _first(error: BaseException) -> BaseException:
    """The exception that ended the run, out of the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(message: str) -> Any:
    sys.stderr.write(f"llamarl: {message}\n")
    sys.exit(2)
