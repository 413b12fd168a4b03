"""The command line: Hydra composes a recipe, a job runs it.

Owns: commands, arguments, exit codes, how errors look. Does not own: jobs. Invariant: the only
place that knows Hydra; past `to_object` a config is plain dataclasses.

Exit codes: 0 done, 1 the run failed (with its traceback), 2 the user must change something (one
line), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.logging import RichHandler

from llamarl import config as schema
from llamarl import jobs
from llamarl.cluster import GroupLost, whole_process
from llamarl.config import Config
from llamarl.metrics.provenance import record_provenance

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
VALUE_FLAGS = {"--config-dir", "-cd", "--config-name", "-cn", "--cfg", "-c", "--package", "-p"}
CONF_FOLDER = Path(__file__).resolve().parent.parent / "conf"

SCHEMAS: dict[tuple[str | None, str], type] = {
    (None, "schema"): Config,
    ("algorithm", "aipo_schema"): schema.AIPOConfig,
    ("algorithm", "reinforce_schema"): schema.ReinforceConfig,
    ("algorithm", "rloo_schema"): schema.RLOOConfig,
    ("algorithm", "ppo_schema"): schema.PPOConfig,
    ("algorithm", "grpo_schema"): schema.GRPOConfig,
    ("algorithm", "dr_grpo_schema"): schema.DrGRPOConfig,
    ("algorithm", "dapo_schema"): schema.DAPOConfig,
    ("algorithm", "cispo_schema"): schema.CISPOConfig,
    ("algorithm", "gspo_schema"): schema.GSPOConfig,
    ("model", "checkpoint_schema"): schema.ModelConfig,
    ("data", "prompts_schema"): schema.DataConfig,
    ("reward", "reward_schema"): schema.RewardConfig,
    ("generator", "embedded_schema"): schema.EmbeddedConfig,
    ("generator", "vllm_schema"): schema.VllmConfig,
    ("trainer", "fsdp2_schema"): schema.TrainerConfig,
    ("weights", "weights_schema"): schema.WeightsConfig,
    ("placement", "placement_schema"): schema.PlacementConfig,
    ("cluster", "cluster_schema"): schema.ClusterConfig,
}

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
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us, not to Hydra's printer
    for (group, name), node in SCHEMAS.items():
        ConfigStore.instance().store(name=name, group=group, node=node, provider="llamarl")
    sys.argv = [f"llamarl {command}", *_with_defaults(composed_arguments)]
    entry = hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name="run")
    try:
        entry(lambda composed: _run(job, composed, [f"llamarl {command}", *arguments]))()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        _fail(_first_cause(error))
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


def _with_defaults(arguments: list[str]) -> list[str]:
    """Flags first, then overrides, as Hydra's parser wants them; the recipe's folder among them."""
    flags: list[str] = []
    overrides: list[str] = []
    previous = ""
    for argument in arguments:
        is_flag = argument.startswith("-") or previous in VALUE_FLAGS
        (flags if is_flag else overrides).append(argument)
        previous = argument
    folder = next((Path(v) for f, v in _flag_values(flags) if f in ("--config-dir", "-cd")), None)
    if folder is None and {"--help", "-h"} & set(flags):
        return ["--config-name=config", "--help"]
    if folder is None:
        return _fail("--config-dir must name a recipe's folder, such as recipes/quickstart")
    if not folder.is_dir():
        return _fail(f"--config-dir must be a recipe's folder, got {str(folder)!r}")
    names = [v for f, v in _flag_values(flags) if f in ("--config-name", "-cn")]
    recipe = folder / f"{(names or ['run'])[-1].removesuffix('.yaml')}.yaml"
    if not recipe.is_file():
        return _fail(f"--config-dir must hold {recipe.name}, got {str(folder)!r} without")
    quoted = str(folder.resolve()).replace("'", "\\'")
    return [*flags, f"recipe_dir='{quoted}'", *overrides]


def _flag_values(flags: list[str]) -> list[tuple[str, str]]:
    """`--config-dir=x` and `--config-dir x` alike."""
    joined = [flag.partition("=") for flag in flags if "=" in flag]
    return [(flag, value) for flag, _, value in joined] + list(pairwise(flags))


def to_config(composed: DictConfig) -> Config:
    """The dataclasses of a composed recipe, all checks run; ValueError for a key nobody knows."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    for key, section in [("", config), *vars(config).items()]:
        if dataclasses.is_dataclass(section):  # Hydra's "+key=value" adds whatever it is told
            unknown = vars(section).keys() - {field.name for field in dataclasses.fields(section)}
            for name in sorted(unknown):
                raise ValueError(
                    f"{f'{key}.{name}'.lstrip('.')} must be a known key, got a new one"
                )
    return config


def _run(job: Job, composed: DictConfig, command: list[str]) -> None:
    """One job; Hydra calls this once per combination of a multirun."""
    run_dir = os.path.abspath(HydraConfig.get().runtime.output_dir)
    is_run = job in JOBS.values()
    try:
        config = to_config(composed)
        yaml_text = OmegaConf.to_yaml(composed, resolve=True)
        record = partial(record_provenance, run_dir, command, yaml_text)
        console = Console()
        handler = RichHandler(console=console, show_path=False)  # never tears the live display
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
        work = job(config, run_dir, console, record)
        if work is not None:
            asyncio.run(work)
    except asyncio.CancelledError:
        sys.stderr.write("llamarl: terminated\n")
        sys.exit(143)
    except OmegaConfBaseException:
        raise
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


def _first_cause(error: BaseException) -> str:
    """One line out of Hydra's several."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).split("Config search path:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith("_schema")]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    words = " ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))
    )
    return words + (f" (key {key})" if key and key not in words else "")


def _fail(message: str) -> Any:
    sys.stderr.write(f"llamarl: {message}\n")
    sys.exit(2)
