"""The command line: a recipe is composed, a job runs it.

Owns: commands, exit codes, how errors look. Does not own: how a recipe is composed
(`composition.py`), jobs. Invariant: a mistake of the user's ends in one line.

Exit codes: 0 done (or every prompt is solved), 1 the run failed (its traceback, or which process
was lost), 2 the user must change something (one line), 75 SIGTERM ended it: the same command goes
on (EX_TEMPFAIL of sysexits.h), 130 interrupted. A run that began says at last what of it is saved,
and how it goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import errno
import gc
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from llamarl import __version__, jobs
from llamarl.checkpoints import checkpoint
from llamarl.cluster import GroupLost, exiting_process
from llamarl.cluster.deploy.launch import RESUMABLE
from llamarl.config import Config
from llamarl.errors import NoGenerator, TaskError
from llamarl.metrics.ending import resume_command
from llamarl.metrics.provenance import record_provenance
from llamarl.metrics.rendering import shorten
from llamarl.recipe.composition import DictConfig, for_each_config, reference, to_config, to_yaml
from llamarl.recipe.config_reference import did_you_mean

ENDS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", RESUMABLE)}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
Job = Callable[[Config, str, Console, jobs.Record], Coroutine[Any, Any, Any] | None]
JOBS: dict[str, Job] = {"train": jobs.train, "evaluate": jobs.evaluate}
COMMANDS = {
    "train": "fine-tune a checkpoint by asynchronous RL",
    "evaluate": "score a checkpoint on held-out prompts",
    "plan": "say, on this CPU, whether a recipe fits its GPUs and how long a step takes",
    "launch": "print what starts a recipe on cluster.scheduler",
    "config": "list the keys of a recipe with their meanings; with KEY or a section, all about it",
    "worker": "serve one host of a run that is started elsewhere (worker --help)",
}

OPTIONS = {  # of the commands that compose a recipe: name and value, what it does
    "--config-dir RECIPE": "folder of the recipe, whose run.yaml is read",
    "--config-name NAME": "read NAME.yaml of it instead",
    "--cfg job": "print the composed config and stop",
}
RUN_OPTIONS = {"--multirun": "run every combination of comma-separated values"}
PLAN_OPTIONS = {  # name of the option and of its value, what it does
    "json": ("FILE", "plan: write the figures as JSON"),
    "html": ("FILE", "plan: write a timeline and a memory chart as one page"),
    "trace": ("RUN", "plan: take executor times from this finished run's folder"),
    "sweep": ("", "plan: try other splits of the GPUs between trainer and generators"),
}


def main() -> None:
    """Entry point of the `llamarl` command."""
    with exiting_process():
        try:
            _main()
            sys.stdout.flush()
        except BrokenPipeError:  # who reads the output, such as head, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            gc.freeze()  # else the interpreter's end looks at all that was imported


def _main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        return _show(_usage())
    if command == "--version":
        return _show(f"llamarl {__version__}\n")
    if command not in COMMANDS:
        meant = did_you_mean(difflib.get_close_matches(command, COMMANDS, n=1))
        _fail(f"the command must be one of {', '.join(COMMANDS)}, got {command!r}{meant}")
    if command == "worker":
        return _serve(arguments)
    if {"--help", "-h"} & set(arguments):
        return _show(_help(command))
    if command == "config":
        return _explain_keys(arguments)
    job, composed_arguments = _choose(command, arguments)
    work = partial(_run, job, ["llamarl", command, *arguments], _folders(arguments))
    try:
        for_each_config(f"llamarl {command}", composed_arguments, work)
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("llamarl: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        raise
    except OSError as error:  # of Hydra, which makes the folder
        _fail(f"run_dir must be a folder that can be written to, got {error}")


def _show(text: str) -> None:
    sys.stdout.write(text)


def _usage() -> str:
    """What `llamarl --help` says."""
    return (
        "usage: llamarl COMMAND --config-dir RECIPE [KEY=VALUE ...]\n\n"
        f"commands:\n{_table(COMMANDS)}\n"
        f"options:\n{_table(OPTIONS | RUN_OPTIONS | _plan_options())}"
        f"{_table({'--help': 'this text; after a command, its options and every key'})}"
        f"{_table({'--version': 'the version of llamarl'})}\n"
        "example: llamarl train --config-dir recipes/quickstart trainer.lr=1e-4\n"
    )


def _help(command: str) -> str:
    """What `llamarl COMMAND --help` says."""
    if command == "config":
        return f"usage: llamarl config [KEY]\n{COMMANDS[command]}\n"
    options = OPTIONS | (RUN_OPTIONS if command in JOBS else {})
    options |= _plan_options() if command == "plan" else {}
    return (
        f"usage: llamarl {command} --config-dir RECIPE [GROUP=CHOICE ...] [KEY=VALUE ...]\n"
        f"{COMMANDS[command]}\n\noptions:\n{_table(options)}\n{reference().everything()}"
    )


def _plan_options() -> dict[str, str]:
    return {f"--{name} {value}": words for name, (value, words) in PLAN_OPTIONS.items()}


def _table(rows: dict[str, str]) -> str:
    return "".join(f"  {name:<22} {words}\n" for name, words in rows.items())


def _explain_keys(names: list[str]) -> None:
    """What `llamarl config [KEY ...]` prints."""
    try:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        texts = [reference().about(name) for name in names] or [reference().overview(width)]
    except ValueError as error:
        _fail(str(error))
    _show("\n\n".join(text.rstrip("\n") for text in texts) + "\n")


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


def _folders(arguments: list[str]) -> set[str]:
    """Run folders that the user names and that are there before Hydra makes any."""
    pairs = (each.partition("=") for each in arguments)
    named = (value for key, _, value in pairs if key == "run_dir")
    return {os.path.abspath(path) for path in named if os.path.isdir(path)}


def _run(
    job: Job, command: list[str], existing: set[str], composed: DictConfig, run_dir: str
) -> None:
    """One job; a multirun calls this once per combination. Folders in `existing` are the user's."""
    is_run = job in JOBS.values()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        config = to_config(composed)
        record = partial(record_provenance, run_dir, command, to_yaml(composed))
        console = Console()
        handler = RichHandler(console=console, show_path=False)  # never tears the live display
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
        work = job(config, run_dir, console, record)
        if work is not None:
            asyncio.run(work)
    except jobs.Stopped as end:
        words, code = ENDS[end.number]
        sys.stderr.write(f"llamarl: {words}\n")
        _exit(code, command, run_dir)
    except Exception as error:  # noqa: BLE001 - the process's last stop: shown, exit code not 0
        if is_run and run_dir not in existing and _is_mistake(error):
            with contextlib.suppress(OSError):
                os.rmdir(run_dir)  # Hydra made it; it goes if nothing is in it
        _exit(_report(error, run_dir if is_run else None), command, run_dir)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM before there is anything to save, or after all is."""
    words, code = ENDS[signal.SIGTERM]
    sys.stderr.write(f"llamarl: {words}\n")
    sys.exit(code)


def _report(error: Exception, run_dir: str | None) -> int:
    """Say what ended the job; the exit code.

    A ValueError or a full disk is the user's to mend: one line. But a ValueError out of a group
    comes from the running loop, where nothing the user wrote is left to check: a bug, shown whole.
    Of a lost process it is said which one and why: the way here leads through calls that only wait.
    """
    cause = _first(error)
    if run_dir is not None and isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
        return _complain(
            f"run_dir must be on a disk with room to write to, got {cause} in {run_dir}"
        )
    if _is_mistake(error):
        _fail(str(error))
    if isinstance(cause, TaskError):
        return _complain(str(cause))
    if isinstance(cause, GroupLost | NoGenerator):
        origin: BaseException = cause
        while not isinstance(origin, GroupLost) and origin.__cause__ is not None:
            origin = origin.__cause__
        end = "" if origin is cause else f"{cause}: "
        sys.stderr.write(f"llamarl: {end}{origin}\n")
        sys.stderr.write(f"llamarl: its log may say why: {run_dir}/logs\n")
        return 1
    remote = getattr(cause, "__notes__", [])
    sys.stderr.write("\n".join(remote) + "\n" if remote else "")
    if not remote:  # else its traceback stands in the note, and the way here says nothing more
        traceback.print_exception(cause)
    return 1


def _is_mistake(error: Exception) -> bool:
    """True for a ValueError out of no group, which is the user's to mend; see `_report`."""
    return isinstance(error, ValueError) and not isinstance(error, BaseExceptionGroup)


def _exit(code: int, command: list[str], run_dir: str) -> Any:
    """Say what is saved of a run that ended early, and how it goes on; then exit."""
    if command[1] == "train" and (newest := checkpoint.latest(run_dir)) is not None:
        version = checkpoint.version_of(newest)
        sys.stderr.write(f"llamarl: version {version} is saved in {shorten(str(newest))}\n")
        sys.stderr.write(f"llamarl: to go on: {resume_command(command, run_dir)}\n")
    elif command[1] == "train":
        sys.stderr.write(f"llamarl: no version is saved in {shorten(run_dir)}\n")
    sys.exit(code)


def _first(error: BaseException) -> BaseException:
    """The exception that ended the run, out of the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(message: str) -> Any:
    sys.exit(_complain(message))


def _complain(message: str) -> int:
    """One line; the exit code that goes with it."""
    sys.stderr.write(f"llamarl: {message}\n")
    return 2
