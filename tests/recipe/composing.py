"""Recipes composed in this process, as the command line composes them; every check runs.

Hydra takes 0.1 s for what the files say, so that is kept; it takes a value after a key faster.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from llamarl.core.config import Config
from llamarl.recipe.choices import CHOICES
from llamarl.recipe.composition import CONF_FOLDER, store_choices, to_config

store_choices()


def compose_recipe(folder: Path, overrides: Sequence[str], file: str = "run") -> Config:
    return compose_file(folder, file, [f"hydra.searchpath=[file://{CONF_FOLDER}]", *overrides])


def compose_file(folder: Path, file: str, overrides: Sequence[str]) -> Config:
    """The file with these overrides, in Hydra's own order: choices of files first, then values."""
    choices, values = [], []
    for override in ["run_dir=x", *overrides]:
        key = override.partition("=")[0]
        (choices if key in CHOICES or key.startswith("hydra.") else values).append(override)
    text = (folder / f"{file}.yaml").read_text()
    composed = copy.deepcopy(_compose_choices(folder, file, text, tuple(choices)))
    ConfigLoaderImpl._apply_overrides_to_config(PARSER.parse_overrides(values), composed)
    return to_config(composed)


PARSER = OverridesParser.create()


@functools.cache
def _compose_choices(folder: Path, file: str, text: str, choices: tuple[str, ...]) -> DictConfig:
    """`text` is that of the file: what another test has written there is another composition."""
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        return compose(file, list(choices))
