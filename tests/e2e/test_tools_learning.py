"""A run of seconds in which the model learns to call its tool, and the same run that must not."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.e2e.forks import Forks
from tests.json_lines import read_lines, write_lines
from tests.places import TOOLS_RECIPE

SHORT = [
    *("cluster=inline", "num_steps=8", "checkpoint.export=false", "trainer.groups_per_step=16"),
    *("trainer.lr=4e-4", "trainer.warmup_steps=0", "staleness.max_staleness=1"),
    *("evaluation.every_steps=0", "evaluation.max_prompts=64"),
]


def triples(folder: Path) -> Path:
    """The recipe with its products of three numbers only, which the checkpoint guesses."""
    recipe = folder / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        rows = read_lines(recipe / name)
        write_lines(recipe / name, [row for row in rows if row["question"].count("*") == 2])
    return recipe


def train(forks: Forks, recipe: Path, run_dir: Path, *overrides: str) -> dict[str, float]:
    done = forks.run("train", f"--config-dir={recipe}", *SHORT, f"run_dir={run_dir}", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    summary: dict[str, float] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.long
def test_a_short_run_learns_to_call_the_tool(forks: Forks, tmp_path: Path) -> None:
    summary = train(forks, triples(tmp_path), tmp_path / "run")
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] > 0.7
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    calls = [each["tool_calls/calculator"] for each in records if "tool_calls/calculator" in each]
    assert calls[-1] > 1.5 * calls[0]


@pytest.mark.long
@pytest.mark.parametrize("control", ["without the tool", "no learning rate", "shuffled answers"])
def test_the_same_run_must_not_learn(forks: Forks, tmp_path: Path, control: str) -> None:
    recipe = triples(tmp_path)
    overrides = {"no learning rate": ["trainer.lr=0"], "without the tool": ["environment.tools=[]"]}
    if control == "shuffled answers":
        rows = read_lines(recipe / "prompts.jsonl")
        answers = [row["answer"] for row in rows]
        random.Random(0).shuffle(answers)
        shuffled = [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]
        write_lines(recipe / "prompts.jsonl", shuffled)
    summary = train(forks, recipe, tmp_path / "run", *overrides.get(control, []))
    assert summary["accuracy_after"] < 0.3
