"""A run of seconds that learns, and the same run that must not: what `make test` says of learning.

The shipped checkpoint guesses sums of four numbers (5 % right when greedy) but sometimes works them
out; a few steps on these alone teach it to. Longer runs and other controls: test_quickstart.py.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.e2e.forks import Forks
from tests.json_lines import read_lines, write_lines
from tests.places import RECIPE

SHORT = [
    *("cluster=inline", "num_steps=8", "sampling.max_tokens=64", "checkpoint.export=false"),
    "trainer.groups_per_step=12",
    *("trainer.lr=4e-4", "trainer.warmup_steps=0"),
    *("evaluation.every_steps=0", "evaluation.max_prompts=64"),
]


def fours(folder: Path) -> Path:
    """The recipe with its sums of four numbers only."""
    recipe = folder / "recipe"
    shutil.copytree(RECIPE, recipe)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        lines = (recipe / name).read_text().splitlines(keepends=True)
        (recipe / name).write_text("".join(line for line in lines if numbers(line) == 4))
    return recipe


def numbers(line: str) -> int:
    return json.loads(line)["question"].count("+") + 1


def train(forks: Forks, recipe: Path, run_dir: Path) -> tuple[dict[str, float], list[float]]:
    """(the summary, the mean reward of every step)."""
    done = forks.run("train", f"--config-dir={recipe}", *SHORT, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr + done.stdout
    summary: dict[str, float] = json.loads((run_dir / "summary.json").read_text())
    records = read_lines(run_dir / "metrics.jsonl")
    return summary, [record["reward/mean"] for record in records if "reward/mean" in record]


def test_a_short_run_learns(forks: Forks, tmp_path: Path) -> None:
    summary, rewards = train(forks, fours(tmp_path), tmp_path / "run")
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] > 0.6  # ten seeds: 0.83 to 1
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4


def test_the_same_run_learns_nothing_from_shuffled_answers(forks: Forks, tmp_path: Path) -> None:
    recipe = fours(tmp_path)
    rows = read_lines(recipe / "prompts.jsonl")
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    shuffled = [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]
    write_lines(recipe / "prompts.jsonl", shuffled)
    summary, rewards = train(forks, recipe, tmp_path / "run")
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] < 0.4  # six seeds: 0.02 to 0.16
    assert max(rewards) < 0.1
