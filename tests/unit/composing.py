"""Recipes composed in this process, as the command line composes them; every check runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir

from llamarl.composition import CONF_FOLDER, store_schemas, to_config
from llamarl.config import Config

store_schemas()


def compose_recipe(folder: Path, overrides: Sequence[str]) -> Config:
    return compose_file(folder, "run", [f"hydra.searchpath=[file://{CONF_FOLDER}]", *overrides])


def compose_file(folder: Path, file: str, overrides: Sequence[str]) -> Config:
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        return to_config(compose(file, ["run_dir=x", *overrides]))
