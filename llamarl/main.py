"""The command line: Hydra composes a recipe, a job runs it.

Owns: commands, arguments, exit codes, how errors look. Does not own: jobs. Invariant: the only
place that knows Hydra; past `to_object` a config is plain dataclasses.

Exit codes: 0 done, 1 the run failed (with its traceback), 2 the user must change something (one
line), 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
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
from llamarl.cluster import GroupLost
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

Job = Callable[[Config, str, Console, jobs.Record], Coroutine[Any, Any, Any]]
COMMANDS: dict[str, tuple[Job, str]] = {
    "train": (jobs.train, "fine-tune a checkpoint by asynchronous RL"),
    "evaluate": (jobs.evaluate, "score a checkpoint on held-out prompts"),
}

USAGE = """usage: llamarl COMMAND --config-dir RECIPE [--config-name run] [key=value ...]

commands:
{commands}

options:
  --config-dir RECIPE    folder of the recipe; its run.yaml is read unless --config-name says else
  --cfg job              print the composed config and stop
  --multirun             run every combination of comma-separated values
  --help                 this text; after a command, the recipe's keys

example: llamarl train --config-dir recipes/quickstart trainer.lr=1e-4
"""


def main() -> None:
    """Entry point of the `llamarl` command."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS)) + 2
        lines = [f"  {name:<{width}}{words}" for name, (_, words) in COMMANDS.items()]
        sys.stdout.write(USAGE.format(commands="\n".join(lines)))
        return
    if command not in COMMANDS:
        _fail(f"the command must be one of {', '.join(COMMANDS)}, got {command!r}")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us, not to Hydra's printer
    for (group, name), node in SCHEMAS.items():
        ConfigStore.instance().store(name=name, group=group, node=node, provider="llamarl")
    sys.argv = [f"llamarl {command}", *_with_defaults(arguments)]
    job = COMMANDS[command][0]
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
    try:
        config = to_config(composed)
        yaml_text = OmegaConf.to_yaml(composed, resolve=True)
        record = partial(record_provenance, run_dir, command, yaml_text)
        console = Console()
        handler = RichHandler(console=console, show_path=False)  # never tears the live display
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
        asyncio.run(job(config, run_dir, console, record))
    except asyncio.CancelledError:
        sys.stderr.write("llamarl: terminated\n")
        sys.exit(143)
    except OmegaConfBaseException:
        raise
    except Exception as error:  # noqa: BLE001 - the process's last stop: shown, exit code not 0
        _report(error, run_dir)


def _report(error: Exception, run_dir: str) -> None:
    """Say what ended the job and exit.

    A ValueError or a full disk is the user's to mend: one line. But a ValueError out of a group
    comes from the running loop, where nothing the user wrote is left to check: a bug, shown whole.
    """
    cause = _first(error)
    if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
        _fail(f"run_dir must be on a disk with room to write to, got {cause} in {run_dir}")
    if cause is error and isinstance(cause, ValueError):
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
