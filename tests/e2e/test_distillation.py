"""Whole runs in which a student becomes more like a teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import RECIPE

CHECKPOINT = RECIPE / "checkpoint"
SMALL = [
    "algorithm=distill",
    "algorithm.filters=[]",
    "num_steps=6",
    "trainer.groups_per_step=4",
    "trainer.lr=5e-4",
    "trainer.warmup_steps=0",
    "data.held_out=null",
    "checkpoint.export=false",
    "metrics.trackers=[]",
]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """What the quickstart's checkpoint computes, by wider layers."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    narrow, wide = config["intermediate_size"], 416
    weights = load_file(CHECKPOINT / "model.safetensors")
    for name, value in weights.items():
        if "mlp" in name:
            shape = [wide if size == narrow else size for size in value.shape]
            weights[name] = torch.zeros(shape)
            weights[name][: value.shape[0], : value.shape[1]] = value
    return write(tmp_path / "teacher", config | {"intermediate_size": wide}, weights)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """The same with noise in its weights."""
    torch.manual_seed(0)
    weights = load_file(CHECKPOINT / "model.safetensors")
    for value in weights.values():
        if value.ndim == 2:
            value += 0.4 * value.std() * torch.randn_like(value)
    return write(
        tmp_path / "student", json.loads((CHECKPOINT / "config.json").read_text()), weights
    )


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder / name)
    return folder


def distances(
    forks: Forks, run_dir: Path, student: Path, teacher: Path, *overrides: str
) -> list[float]:
    """KL to the teacher, step by step."""
    done = forks.run(
        "train",
        f"--config-dir={RECIPE}",
        f"run_dir={run_dir}",
        *SMALL,
        f"model.checkpoint={student}",
        f"algorithm.teacher={teacher}",
        *overrides,
    )
    assert done.returncode == 0, done.stderr
    lines = read_lines(run_dir / "metrics.jsonl")
    return [line["trained/kl_reference"] for line in lines if "trained/kl_reference" in line]


@pytest.mark.long
@pytest.mark.full
def test_a_student_gets_closer_to_a_teacher_of_another_width(
    forks: Forks, tmp_path: Path, student: Path, teacher: Path
) -> None:
    found = distances(forks, tmp_path / "run", student, teacher, "cluster=inline")
    assert len(found) == 6
    assert sum(found[-2:]) < sum(found[:2]) / 1.5


@pytest.mark.long
def test_so_does_one_with_adapters_on_two_ranks_that_are_rewarded_too(
    forks: Forks, tmp_path: Path, student: Path, teacher: Path
) -> None:
    more = ["trainer.lora.rank=16", "trainer.lr=2e-3", "trainer.num_ranks=2"]
    more += ["algorithm.reward_coefficient=0.1", "num_steps=8", "trainer.groups_per_step=8"]
    found = distances(forks, tmp_path / "run", student, teacher, *more)
    assert sum(found[-2:]) < sum(found[:2]) / 1.5
    names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert any("reference" in name for name in names), "the teacher is no adapter"


def test_a_teacher_with_other_tokens_is_refused_in_one_line(
    forks: Forks, tmp_path: Path, teacher: Path
) -> None:
    values = json.loads((teacher / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["3"], vocab["7"] = vocab["7"], vocab["3"]
    (teacher / "tokenizer.json").write_text(json.dumps(values))
    arguments = [*SMALL, f"algorithm.teacher={teacher}", f"run_dir={tmp_path / 'run'}"]
    done = forks.run("train", f"--config-dir={RECIPE}", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2
    assert "algorithm.teacher must have the tokens of the policy's tokenizer" in done.stderr
