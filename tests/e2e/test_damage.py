"""Damage on disk is named before anything starts, and never learnt from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.forks import Forks
from tests.e2e.test_inline_runs import RECIPE, SMALL
from tests.places import ROOT

KEEPING = [*SMALL, "data.held_out=null", "checkpoint.every_steps=1", "checkpoint.keep=0"]


@pytest.fixture(scope="module")
def finished(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both checkpoints and an export; copy it, do not touch it."""
    run_dir = tmp_path_factory.mktemp("damage") / "run"
    done = forks.run(
        "train", f"--config-dir={RECIPE}", *KEEPING, "checkpoint.export=true", f"run_dir={run_dir}"
    )
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def commit(path: Path, bit: int = 6) -> None:
    """Turn one bit over in the middle of a file: of a weight, an exponent's."""
    data = bytearray(path.read_bytes())
    place = len(data) // 2 // 4 * 4 + 3
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    forks: Forks, run_dir: Path
) -> None:
    checkpoints = run_dir / "checkpoints"
    commit(checkpoints / "step-00000002" / "__0_0.distcp")
    resume = ["train", f"--config-dir={RECIPE}", *KEEPING, f"run_dir={run_dir}"]
    done = forks.run(*resume, "checkpoint.resume=auto")
    assert done.returncode == 0, done.stderr
    said = "".join((done.stdout + done.stderr).split())  # which is wrapped anywhere
    assert "resumingfromstep-00000001" in said
    assert "step-00000002/__0_0.distcpmustholdthebytesthat" in said
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["damaged-step-00000002", "step-00000001", "step-00000002"]
    assert json.loads((run_dir / "summary.json").read_text())["rollouts_trained"] == 2 * 4 * 8


def test_a_damaged_export_is_not_evaluated(forks: Forks, run_dir: Path) -> None:
    commit(run_dir / "export" / "model.safetensors")
    export, other = run_dir / "export", run_dir.with_name("other")
    arguments = [*SMALL, f"model.checkpoint={export}", f"run_dir={other}"]
    done = forks.run("evaluate", f"--config-dir={RECIPE}", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "model.safetensors must hold the bytes that" in done.stderr


@pytest.mark.long
def test_damaged_files_and_keys_are_named_or_survived_and_never_believed(forks: Forks) -> None:
    """A few inputs of every kind; `make fuzz` tries over a thousand."""
    fuzz = str(ROOT / "tools" / "fuzz.py")
    done = forks.run(fuzz, "--seed=0", "--cases=48", "--runs=0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match("48 cases, 0 findings", last)
    counts = re.search(r"^all +(\d+) +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert counts is not None
    refused, passed_over, accepted = map(int, counts.groups())
    assert refused > 25, "else the damage does not reach what is checked"
    assert passed_over > 3
    assert accepted > 3
