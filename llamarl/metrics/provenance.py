"""What a run was started with, written before its first process starts: config, command, versions,
commit."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Record = Callable[[], None]
"""Writes into the run folder what the run was started with."""

PACKAGES = ("llamarl", "torch", "torchmonarch", "transformers", "safetensors", "hydra-core")


def record_provenance(run_dir: str | Path, command: Sequence[str], config_yaml: str) -> None:
    """Write config.yaml, command.txt and environment.json into `run_dir`."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_yaml)
    with (folder / "command.txt").open("a") as file:  # a resumed run has several commands
        file.write(f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}\n")
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")


def flatten(section: object, prefix: str = "") -> dict[str, object]:
    """`Config(trainer=TrainerConfig(lr=0.1))` -> {"trainer.lr": 0.1, ...}."""
    assert dataclasses.is_dataclass(section)
    flat: dict[str, object] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree, with "-dirty" if it was changed; None outside a repository."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    source = Path(__file__).resolve().parent
    try:
        done = subprocess.run(describe, cwd=source, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
