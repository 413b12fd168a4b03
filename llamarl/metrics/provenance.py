"""The record of how a run was started, in its folder. Records of earlier starts stay: their
commands in command.txt, their files of the recipe under another name."""

import json
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from itertools import count
from pathlib import Path

LOGGER = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
RECIPE_FOLDER = "recipe"
ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("llamarl", "torch", "torchmonarch", "transformers", "safetensors", "hydra-core")

WriteProvenance = Callable[[Mapping[str, str] | None], None]
"""A function that writes into the run folder how the run was started; it gets the task.py that is
used, and its neighbours."""


def keep_nothing(task: Mapping[str, str] | None) -> None:
    """Write nothing: the WriteProvenance of a run that leaves no folder."""


def write_provenance(
    run_dir: str | Path,
    command: Sequence[str],
    config_yaml: str,
    recipe: Path,
    task: Mapping[str, str] | None,
) -> None:
    """Write config.yaml, command.txt, environment.json and the recipe's files into `run_dir`.

    `recipe` is the file that was composed; `task` has the texts of task.py and its neighbours.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config_yaml)
    with suppress(FileExistsError):  # so that the folder itself is a recipe
        (folder / "run.yaml").symlink_to(CONFIG_FILE)
    with (folder / "command.txt").open("a") as file:  # a resumed run has several commands
        file.write(f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}\n")
    texts = {recipe.name: recipe.read_text("utf-8"), **(task or {})}
    _keep(folder / RECIPE_FOLDER, texts)
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(Path(__file__).parent),
        "recipe": {
            "git_commit": _git_commit(recipe.parent),
            "sha256": {name: sha256(text.encode()).hexdigest() for name, text in texts.items()},
        },
    }
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n")


def _keep(folder: Path, texts: Mapping[str, str]) -> None:
    """Write these files of the recipe; those of an earlier start, if they differ, move aside."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    kept = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}
    if kept == texts:
        return
    if kept:
        paths = (folder.with_name(f"{RECIPE_FOLDER}-{number}") for number in count(1))
        aside = next(path for path in paths if not path.exists())
        folder.rename(aside)
        changed = ", ".join(sorted({name for name, _ in kept.items() ^ texts.items()}))
        words = "%s: changed since this run was last started; the files of then are in %s"
        LOGGER.warning(words, changed, aside.name)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git_commit(folder: Path) -> str | None:
    """Return the commit of the folder's content, with "-dirty" if its repository was changed; None
    outside a repository."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(describe, cwd=folder, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() or None
    return None
