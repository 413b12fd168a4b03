"""Whole runs that train adapters: what they publish, keep, export and start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import RECIPE

SMALL = [
    "trainer.lora.rank=4",
    "trainer.groups_per_step=8",
    "trainer.lr=2e-3",
    "trainer.warmup_steps=0",
    "evaluation.max_prompts=16",
    "evaluation.every_steps=0",
    "num_steps=2",
]


def run(forks: Forks, folder: Path, *overrides: str) -> Path:
    done = forks.run("train", f"--config-dir={RECIPE}", f"run_dir={folder}", *SMALL, *overrides)
    assert done.returncode == 0, done.stderr
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.full
def test_a_run_publishes_verifies_and_exports_adapters_alone(forks: Forks, tmp_path: Path) -> None:
    """With a KL term too, which needs no second model: nothing but the policy's processes run."""
    folder = run(forks, tmp_path / "first", "algorithm=grpo", "cluster=inline")
    steps = read_lines(folder / "metrics.jsonl")
    assert any("kl" in name for line in steps for name in line)
    assert not [*(folder / "spans").glob("reference*")]
    weights = load_file(folder / "export" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in weights)
    assert any(each.any() for name, each in weights.items() if "lora_B" in name)
    # A second run starts from it, and evaluates it first.
    second = run(forks, tmp_path / "second", f"model.adapter={folder}/export", "num_steps=1",
                 "trainer.lora.rank=0", "cluster=inline")  # fmt: skip
    assert summary(second)["accuracy_before"] == summary(folder)["accuracy_after"]


@pytest.mark.long
def test_adapters_learn_what_whole_weights_learn(forks: Forks, tmp_path: Path) -> None:
    """The quickstart with half its steps, whose accuracy begins at 43 %."""
    done = forks.run(
        "train",
        f"--config-dir={RECIPE}",
        f"run_dir={tmp_path / 'run'}",
        *("trainer.lora.rank=16", "trainer.lr=2e-3", "num_steps=15", "evaluation.every_steps=0"),
    )
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "run")
    assert found["accuracy_before"] < 0.5
    assert found["accuracy_after"] > 0.8
