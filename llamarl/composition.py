"""How a recipe's folder and the arguments become a checked `Config`.

Owns: Hydra's groups and schemas, how its mistakes read. Does not own: fields and checks (`config/`)
or commands (`main.py`). Invariant: the only place that knows Hydra; past `to_config` a config is
plain dataclasses.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llamarl import config as schema
from llamarl.config import Config

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


def store_schemas() -> None:
    """Make the dataclasses known to Hydra under the names that `conf/` calls them by."""
    for (group, name), node in SCHEMAS.items():
        ConfigStore.instance().store(name=name, group=group, node=node, provider="llamarl")


def for_each_config(
    program: str, arguments: list[str], work: Callable[[DictConfig, str], None]
) -> None:
    """Call `work` with the composed recipe and its run folder; once per combination of a multirun.

    `program` is the command that the arguments follow. ValueError for a recipe or arguments that
    do not compose, OSError for a run folder that cannot be made.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us, not to Hydra's printer
    store_schemas()
    sys.argv = [program, *_with_defaults(arguments)]
    entry = hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name="run")
    try:
        entry(lambda composed: work(composed, _run_dir()))()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(_first_cause(error)) from error


def _run_dir() -> str:
    return os.path.abspath(HydraConfig.get().runtime.output_dir)


def to_config(composed: DictConfig) -> Config:
    """The dataclasses of a composed recipe, all checks run; ValueError for one that fails."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_first_cause(error)) from error
    assert isinstance(config, Config)
    for key, section in [("", config), *vars(config).items()]:
        if dataclasses.is_dataclass(section):  # Hydra's "+key=value" adds whatever it is told
            unknown = vars(section).keys() - {field.name for field in dataclasses.fields(section)}
            for name in sorted(unknown):
                raise ValueError(
                    f"{f'{key}.{name}'.lstrip('.')} must be a known key, got a new one"
                )
    return config


def to_yaml(composed: DictConfig) -> str:
    """The composed recipe as one YAML document, every value spelt out."""
    return OmegaConf.to_yaml(composed, resolve=True)


def _with_defaults(arguments: list[str]) -> list[str]:
    """Flags first, then overrides, as Hydra's parser wants them; the recipe's folder among them.

    ValueError unless they name a recipe.
    """
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
        raise ValueError("--config-dir must name a recipe's folder, such as recipes/quickstart")
    if not folder.is_dir():
        raise ValueError(f"--config-dir must be a recipe's folder, got {str(folder)!r}")
    names = [v for f, v in _flag_values(flags) if f in ("--config-name", "-cn")]
    recipe = folder / f"{(names or ['run'])[-1].removesuffix('.yaml')}.yaml"
    if not recipe.is_file():
        raise ValueError(f"--config-dir must hold {recipe.name}, got {str(folder)!r} without")
    quoted = str(folder.resolve()).replace("'", "\\'")
    return [*flags, f"recipe_dir='{quoted}'", *overrides]


def _flag_values(flags: list[str]) -> list[tuple[str, str]]:
    """`--config-dir=x` and `--config-dir x` alike."""
    joined = [flag.partition("=") for flag in flags if "=" in flag]
    return [(flag, value) for flag, _, value in joined] + list(pairwise(flags))


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
