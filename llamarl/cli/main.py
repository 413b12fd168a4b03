"""The command line: composes a recipe and runs a job with it.

Exit codes: 0 done (or every prompt is solved), 1 the run failed (its traceback, or which process
was lost), 2 the user must change something (one line), 75 SIGTERM ended it and the same command
resumes it (EX_TEMPFAIL of sysexits.h), 130 interrupted. A run that ends early says which version is
saved, and which command resumes it."""

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import starmap
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from llamarl import __version__
from llamarl.cli import new, reports, train
from llamarl.cli.check import check
from llamarl.cli.rehearse import rehearse
from llamarl.cluster import ExecutorLost, exiting_process
from llamarl.cluster.launch import RESUMABLE
from llamarl.cluster.os_process import kept_log, show_warnings, take_any_letter
from llamarl.controller import control
from llamarl.core import checkpoint
from llamarl.core.config import Config
from llamarl.core.errors import Diverged, NoGenerator, TaskError, unwrap
from llamarl.core.fields import require, require_choice
from llamarl.metrics.provenance import RECIPE_FOLDER, WriteProvenance, write_provenance
from llamarl.metrics.rendering import CLOCK, find_program, resume_command, shorten
from llamarl.recipe.composition import (
    MULTIRUN_FLAGS,
    DictConfig,
    arguments_of_job,
    as_argument,
    for_each_config,
    recipe_file,
    reference,
    to_config,
    to_yaml,
)
from llamarl.recipe.local_inputs import repeatable_inputs, with_local_files
from llamarl.view import compare, page

log = logging.getLogger(__name__)

ENDS: dict[int, tuple[str, int]] = {
    signal.SIGINT: ("interrupted", 130),
    signal.SIGTERM: ("terminated", RESUMABLE),
}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
LEAST_FILES = 64  # of the processes of the smallest run
Job = Callable[[Config, str, Console, WriteProvenance], Coroutine[Any, Any, Any] | None]
JOBS: dict[str, Job] = {"train": train.train, "sft": train.sft, "evaluate": train.evaluate}
COMMANDS = {
    "train": "fine-tune a checkpoint by asynchronous RL",
    "sft": "fine-tune a checkpoint on demonstrations, without generators",
    "evaluate": "score a checkpoint on held-out prompts",
    "plan": "say, on this CPU, whether a recipe fits its GPUs and how long a step takes",
    "check": "try the executors of a recipe on this machine, against what the CPU says",
    "rehearse": "play its episodes without its model, with faults, and say what would go wrong",
    "graph": "print a recipe's dataflow: its stages, where they run, what goes between them",
    "launch": "print what starts a recipe on cluster.scheduler",
    "new": "write a recipe of ten lines for a model, data and a reward (new --help)",
    "models": "list the families of models; with a folder or hf:ORG/NAME, what runs it",
    "config": "list the keys of a recipe with their meanings; with KEY or a section, describe it",
    "status": "say what a run at work does: versions, load, faults (status --help)",
    "scale": "add generator replicas to a run at work, or remove some (scale --help)",
    "view": "write the rollouts that a run has kept as one page for a browser (view --help)",
    "merge": "add an adapter to the weights of its checkpoint (merge --help)",
    "compare": "draw the curves of several runs, and say what differs (compare --help)",
    "worker": "serve one host of a run that is started elsewhere (worker --help)",
}
PLAIN_COMMANDS: dict[str, tuple[Callable[[list[str]], str], str]] = {  # no recipe; and their help
    "new": (new.new, new.USAGE),
    "models": (reports.models, reports.MODELS_USAGE),
    "status": (control.status, control.USAGE["status"]),
    "scale": (control.scale, control.USAGE["scale"]),
    "view": (page.view, page.USAGE),
    "merge": (reports.merge, reports.MERGE_USAGE),
    "compare": (compare.compare, compare.USAGE),
}

OPTIONS = {  # of the commands that compose a recipe: name and value, what it does
    "--config-dir RECIPE": "folder of the recipe, whose run.yaml is read",
    "--config-name NAME": "read NAME.yaml of it instead",
    "--cfg job": "print the composed config and stop",
}
RUN_OPTIONS = {"--multirun": "run every combination of comma-separated values"}
REPORTS: dict[str, Callable[..., Any]]
REPORTS = {
    "plan": reports.plan,
    "check": check,
    "rehearse": rehearse,
    "graph": reports.graph,
}
OWN_OPTIONS = {  # of each report: name of the option and of its value, what it does
    "plan": {
        "json": ("FILE", "plan: write the figures as JSON"),
        "trace": ("RUN", "plan: take executor times from this finished run's folder"),
        "only": ("SIDE", "plan: forecast the trainer, a generator or a publish alone"),
        "sweep": ("", "plan: try other splits of the GPUs between trainer and generators"),
    },
    "check": {},
    "rehearse": {
        "against": ("URL|FILE", "rehearse: let an endpoint play, or a run's archive/kept-0.jsonl"),
        "policy": ("NAME", "rehearse: scripted (the default), or tiny: small random weights"),
        "prompts": ("N", "rehearse: so many prompts (8)"),
        "faults": ("NAME=SHARE,...", "rehearse: slow, fail, kill, drop, lose, commit; or none"),
        "json": ("FILE", "rehearse: write the figures as JSON"),
    },
    "graph": {
        "mermaid": ("FILE", "graph: write it as a picture in Mermaid's text"),
        "run": ("RUN", "graph: add rows, bytes and waiting, measured in this run's folder"),
    },
}


def program() -> None:
    """Run `main` as the entry point of the `llamarl` command, in a process that ends with it."""
    with exiting_process():
        main()


def main() -> None:
    """Run the command; SystemExit with its exit code unless that is 0."""
    take_any_letter(sys.stdout, sys.stderr)
    try:
        _main(*(sys.argv[1:] or ["--help"]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        sys.exit(_complain(str(error)))
    except KeyboardInterrupt:
        sys.exit(_end(signal.SIGINT))


def _main(command: str, *arguments: str) -> None:
    """Run `command`; ValueError says what the user must change before a job starts."""
    if command in ("-h", "--help", "help"):
        return _show(_usage())
    if command == "--version":
        return _show(f"llamarl {__version__}\n")
    require_choice("the command", command, COMMANDS)
    if command == "worker":  # has no recipe: the controller that attaches brings the config
        from llamarl.cluster import daemon

        return daemon.main(list(arguments))
    asks_help = bool({"--help", "-h"} & set(arguments))
    if command in PLAIN_COMMANDS:
        words, usage = PLAIN_COMMANDS[command]
        return _show(usage if asks_help else words(list(arguments)))
    if asks_help:
        return _show(_help(command))
    if command == "config":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        texts = [*map(reference().about, arguments)] or [reference().overview(width)]
        return _show("\n\n".join(text.rstrip("\n") for text in texts) + "\n")
    job, composed_arguments = _choose(command, list(arguments))
    # Run folders that exist before Hydra makes any.
    named = (each.removeprefix("run_dir=") for each in arguments if each.startswith("run_dir="))
    existing = {os.path.abspath(path) for path in named if os.path.isdir(path)}
    work = partial(_run, job, ["llamarl", command, *arguments], existing)
    try:
        for_each_config(f"llamarl {command}", composed_arguments, work)
    except BrokenPipeError:
        raise
    except OSError as error:  # of Hydra, which makes the folder
        got = f"the file {error.filename!r}" if isinstance(error, FileExistsError) else error
        raise ValueError(f"run_dir must be a folder that can be written to, got {got}") from error


def _show(text: str) -> None:
    sys.stdout.write(text)


def _usage() -> str:
    """Return the text of `llamarl --help`."""
    options = OPTIONS | RUN_OPTIONS | _own_options(*OWN_OPTIONS)
    options["--help"] = "this text; after a command, its options and every key"
    options["--version"] = "the version of llamarl"
    return (
        "usage: llamarl COMMAND --config-dir RECIPE [KEY=VALUE ...]\n\n"
        f"commands:\n{_table(COMMANDS)}\noptions:\n{_table(options)}\n"
        "example: llamarl train --config-dir recipes/quickstart trainer.lr=1e-4\n"
    )


def _help(command: str) -> str:
    """Return the text of `llamarl COMMAND --help`."""
    if command == "config":
        return f"usage: llamarl config [KEY]\n{COMMANDS[command]}\n"
    options = OPTIONS | (RUN_OPTIONS if command in JOBS else {}) | _own_options(command)
    return (
        f"usage: llamarl {command} --config-dir RECIPE [GROUP=CHOICE ...] [KEY=VALUE ...]\n"
        f"{COMMANDS[command]}\n\noptions:\n{_table(options)}\n{reference().everything()}"
    )


def _own_options(*commands: str) -> dict[str, str]:
    found = [OWN_OPTIONS.get(command, {}) for command in commands]
    return {f"--{name} {value}": words for own in found for name, (value, words) in own.items()}


def _table(rows: dict[str, str]) -> str:
    return "".join(f"  {name:<22} {words}\n" for name, words in rows.items())


def _choose(command: str, arguments: list[str]) -> tuple[Job, list[str]]:
    """Return the job, and the arguments for Hydra, which makes a run folder for jobs of JOBS
    only."""
    if command in JOBS:
        is_chosen = any(each.startswith("algorithm=") for each in arguments)
        chosen = ["algorithm=sft"] if command == "sft" and not is_chosen else []
        return JOBS[command], [*arguments, *chosen]
    if MULTIRUN_FLAGS & set(arguments):
        raise ValueError(f"--multirun must come with train or evaluate, got {command}")
    report: Callable[..., Any] = reports.launch
    options, rest = {"command": arguments}, arguments
    if command != "launch":
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name, (value, _) in OWN_OPTIONS[command].items():
            parser.add_argument(f"--{name}", action="store" if value else "store_true")
        try:
            found, rest = parser.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            got = f"got nothing ({error.message})"
            raise ValueError(f"{error.argument_name} must name a file or folder, {got}") from error
        report, options = REPORTS[command], vars(found)

    def job(config: Config, run_dir: str, console: Console, write: WriteProvenance) -> Any:
        return report(config, console, **options)

    return job, [*rest, "hydra.run.dir=."]


def _run(
    job: Job, command: list[str], existing: set[str], composed: DictConfig, run_dir: str
) -> None:
    """Run a job; a multirun calls this once per combination. Hydra did not make the folders
    `existing`."""
    is_run = job in JOBS.values()

    def terminate(number: int, frame: FrameType | None) -> None:
        """End on SIGTERM, before there is anything to save or after all is saved."""
        _exit(_end(number), command, run_dir)

    signal.signal(signal.SIGTERM, terminate)
    with contextlib.ExitStack() as logs:
        try:
            config = to_config(composed)
            # This process, and those that it starts, may open as many files as the system allows.
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            is_enough = most >= LEAST_FILES or most == resource.RLIM_INFINITY
            label = "the limit of open files (ulimit -n)"
            require(is_enough, label, f"be {LEAST_FILES} or more", most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            console = Console()
            CLOCK.restart()
            is_inline = config.cluster.backend == "inline"
            show_warnings(console, CLOCK.words, shows_user_code=is_inline)
            given = config
            config, pinned = with_local_files(config, command[1], run_dir)

            def write(task: Mapping[str, str] | None) -> None:
                values = {"recipe_dir": RECIPE_FOLDER, **repeatable_inputs(given, pinned)}
                text = to_yaml(composed, values)
                recipe = recipe_file(command[2:])
                write_provenance(run_dir, _alone(command, pinned), text, recipe, task)
                logs.enter_context(kept_log(run_dir))

            work = job(config, run_dir, console, write)
            if work is not None:
                asyncio.run(work)
        except train.Stopped as end:
            _exit(_end(end.number), command, run_dir)
        except KeyboardInterrupt:  # before the job answers signals itself
            _exit(_end(signal.SIGINT), command, run_dir)
        except Exception as error:  # noqa: BLE001 - the last stop: shown, exit code not 0
            if is_run and run_dir not in existing and _is_mistake(error):
                with contextlib.suppress(OSError):
                    os.rmdir(run_dir)  # made by Hydra, and removed if empty
            _exit(_report(error, run_dir if is_run else None), command, run_dir)


def _alone(command: list[str], pinned: Mapping[str, Any]) -> list[str]:
    """Return the command that does the present job again, wherever the program is and even if a
    branch of the Hub has changed; of a multirun, that job alone."""
    program, name, *arguments = command
    if MULTIRUN_FLAGS & set(arguments):
        arguments = arguments_of_job(arguments)
    replaced = tuple(f"{key}=" for key in pinned)
    kept = (each for each in arguments if not each.startswith(replaced))
    return [find_program(program), name, *kept, *starmap(as_argument, pinned.items())]


def _end(number: int) -> int:
    """Say that this signal ended the command; return the exit code."""
    words, code = ENDS[number]
    _say(words)
    return code


def _report(error: Exception, run_dir: str | None) -> int:
    """Say what ended the job; return the exit code.

    A ValueError or a full disk, which the user can fix, gets one line. But a ValueError out of a
    group is from the running loop, after all checks of what the user wrote, so it is a bug and gets
    its traceback. For a lost process it says which one and why, without the traceback through calls
    that only waited.
    """
    cause = unwrap(error)
    if run_dir is not None and isinstance(cause, OSError):
        if cause.errno in DISK_ERRORS:
            must = "be on a disk with room to write to"
            return _complain(f"run_dir must {must}, got {cause} in {run_dir}")
        missing = os.path.abspath(str(cause.filename or ""))
        if isinstance(cause, FileNotFoundError) and missing.startswith(os.path.abspath(run_dir)):
            return _complain(f"run_dir must stay in its place while a run works there, got {cause}")
    if _is_mistake(error):
        sys.exit(_complain(str(error)))
    if isinstance(cause, TaskError | Diverged):
        return _complain(str(cause))
    if isinstance(cause, ExecutorLost | NoGenerator):
        origin: BaseException = cause
        while not isinstance(origin, ExecutorLost) and origin.__cause__ is not None:
            origin = origin.__cause__
        end = "" if origin is cause else f"{cause}: "
        _say(f"{end}{origin}")
        _say(f"its log may say why: {run_dir}/logs")
        return 1
    remote = getattr(cause, "__notes__", [])
    # A note has the remote traceback, and this one says nothing more.
    text = "\n".join(remote) or "".join(traceback.format_exception(cause)).rstrip("\n")
    log.info("%s", text)
    sys.stderr.write(text + "\n")
    return 1


def _is_mistake(error: Exception) -> bool:
    """Return whether the error is a ValueError that is in no group, which the user can fix; see
    `_report`."""
    return isinstance(error, ValueError) and not isinstance(error, BaseExceptionGroup)


def _exit(code: int, command: list[str], run_dir: str) -> NoReturn:
    """Say which version of a run that ended early is saved, and how to resume it; then exit."""
    if command[1] in ("train", "sft"):
        if (newest := checkpoint.latest(run_dir)) is None:
            _say(f"no version is saved in {shorten(run_dir)}")
        else:
            version = checkpoint.version_of(newest)
            _say(f"version {version} is saved in {shorten(str(newest))}")
            _say(f"to resume: {resume_command(command, run_dir)}")
    sys.exit(code)


def _complain(message: str) -> int:
    """Say what the user must change; return the exit code for it."""
    _say(message)
    return 2


def _say(line: str) -> None:
    """Write one line, and log it."""
    log.info("%s", line)
    sys.stderr.write(f"llamarl: {line}\n")


if __name__ == "__main__":
    program()
