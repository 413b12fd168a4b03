"""The groups of a recipe, and the choices of each by name, with the section that it selects."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llamarl.core import config as schema
from llamarl.publish.transports.routes import TRANSPORTS
from llamarl.recipe.reference import Choice, default_of
from llamarl.scoring import judge
from llamarl.scoring.rewards import REWARDS
from llamarl.trainer.losses import algorithms

REWARD_VALUES = {judge.NAME: {"timeout_s": 300.0}}
"""What a choice of `reward` sets beside its function: a judge is asked again when it fails."""
CHOICES: dict[str, dict[str, Choice]] = {
    "algorithm": {name: Choice(options) for name, options in algorithms().items()},
    "cluster": {
        "monarch": Choice(schema.ClusterConfig),
        "inline": Choice(schema.ClusterConfig, {"backend": "inline"}),
        "slurm": Choice(schema.ClusterConfig, {"scheduler": "slurm"}),
        "kubernetes": Choice(schema.ClusterConfig, {"scheduler": "kubernetes"}),
    },
    "data": {"plain": Choice(schema.DataConfig), "chat": Choice(schema.DataConfig, {"chat": True})},
    "generator": {"embedded": Choice(schema.EmbeddedConfig), "vllm": Choice(schema.VllmConfig)},
    "model": {"checkpoint": Choice(schema.ModelConfig)},
    "placement": {
        "disaggregated": Choice(schema.PlacementConfig),
        "colocated": Choice(schema.PlacementConfig, {"colocated": True}),
    },
    "reward": {
        name: Choice(schema.RewardConfig, {"functions": [name], **REWARD_VALUES.get(name, {})})
        for name in REWARDS
    },
    "trainer": {
        "native": Choice(schema.TrainerConfig),
        "transformers": Choice(schema.TransformersConfig),
    },
    "weights": {name: Choice(schema.WeightsConfig, {"transport": name}) for name in TRANSPORTS},
}


def chosen(kinds: Mapping[str, type | None], composed: Any) -> dict[str, str]:
    """Return by group the choice whose class (`kinds`) and values the composed recipe's section
    has; none of a group whose values no choice sets, such as two reward functions."""
    found: dict[str, str] = {}
    for group, choices in CHOICES.items():
        fitting = {
            name: len(choice.values)
            for name, choice in choices.items()
            if kinds[group] is choice.section
            and all(composed[group][key] == value for key, value in choice.values.items())
        }
        if fitting:
            found[group] = max(fitting, key=lambda name: fitting[name])
    return found


@cache
def set_by(group: str, name: str, other: str) -> Mapping[str, Any]:
    """Return what this choice of the group sets against a recipe that was written for the `other`,
    or for a file of its own: the keys that choices of the group are about, and those that have
    other defaults."""
    about = {key for choice in CHOICES[group].values() for key in choice.values}
    values: dict[str, dict[str, Any]] = {name: {}, other: {}}
    for each in values.keys() & CHOICES[group].keys():
        choice = CHOICES[group][each]
        fields = dataclasses.fields(choice.section)
        values[each] = {field.name: default_of(field) for field in fields} | dict(choice.values)
    others = values[other]
    return {k: v for k, v in values[name].items() if k in about or others.get(k, v) != v}


def written_choices(recipe: Path) -> dict[str, str]:
    """Return by group the choice that the recipe's file names in its defaults, or a file of its
    folder that it begins with."""
    try:
        values = yaml.safe_load(recipe.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # Hydra says what is wrong
        return {}
    found: dict[str, str] = {}
    for entry in values.get("defaults") or [] if isinstance(values, dict) else []:
        if isinstance(entry, dict):
            found |= {str(key).split()[-1].strip("/"): str(name) for key, name in entry.items()}
        elif isinstance(entry, str) and (path := recipe.parent / f"{entry}.yaml") != recipe:
            found |= written_choices(path) if path.is_file() else {}
    return found


def settle(composed: Any, arguments: Mapping[str, Any], written: Mapping[str, str]) -> None:
    """Give the recipe what the choices among the arguments (values by group or key) set against
    those that are `written` in its file."""
    for group, name in arguments.items():
        if not isinstance(name, str) or name not in CHOICES.get(group, {}):
            continue
        for key, value in set_by(group, name, written[group]).items():
            if not any(f"{each}.".startswith(f"{group}.{key}.") for each in arguments):
                composed[group][key] = value
