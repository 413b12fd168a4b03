"""The commands that a user can paste, and what a disk must have."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.cli import train
from llamarl.metrics.provenance import write_provenance
from llamarl.metrics.rendering import resume_command
from llamarl.model.architecture import read_architecture
from tests.places import CHECKPOINT, RECIPE
from tests.unit.test_config import MINIMUM, make_config

TRAIN = ["llamarl", "train", "--config-dir", "recipes/a b", "num_steps=9"]


def test_the_command_of_a_run_can_be_pasted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_provenance(tmp_path, TRAIN, "", RECIPE / "run.yaml", None)
    words = shlex.split((tmp_path / "command.txt").read_text())
    assert words == ["cd", str(folder), "&&", *TRAIN]


@pytest.mark.parametrize("more", [[], ["checkpoint.resume=off", "run_dir=elsewhere"]])
def test_the_command_that_goes_on_names_the_folder_and_resumes(
    more: list[str], tmp_path: Path
) -> None:
    program, *arguments = shlex.split(resume_command([*TRAIN, *more], str(tmp_path)))
    assert os.path.basename(program) == "llamarl"
    assert arguments == [*TRAIN[1:], f"run_dir={tmp_path}", "checkpoint.resume=auto"]


def test_a_multirun_keeps_its_own_folders() -> None:
    words = shlex.split(resume_command([*TRAIN, "-m", "seed=1,2", "run_dir=r"], "/r/0"))
    assert words[-4:] == ["-m", "seed=1,2", "run_dir=r", "checkpoint.resume=auto"]


def test_a_disk_that_is_nearly_large_enough_is_shown_in_figures_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = SimpleNamespace(architecture=read_architecture(CHECKPOINT))
    config = make_config(*MINIMUM)
    for free in (0, 10**7, 2 * 10**7):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(ValueError, match=rf"got {free // 10**6} MB at") as caught:
            train._check_disk(config, inputs, str(tmp_path))  # type: ignore[arg-type]
        assert f"with {free // 10**6} MB" not in str(caught.value)
