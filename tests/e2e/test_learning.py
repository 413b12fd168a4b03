"""Runs of seconds that learn, and the same runs that must not: what `make test` says of learning.

The shipped checkpoint guesses sums of four numbers (5 % right when greedy) but sometimes works them
out; a few steps on these alone teach it to. Longer runs: test_quickstart.py.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from llamarl.view.compare import compare
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines, write_lines
from tests.places import RECIPE, TOOLS_RECIPE

SHORT = [
    *("cluster=inline", "num_steps=8", "sampling.max_tokens=64", "checkpoint.export=false"),
    "trainer.groups_per_step=12",
    *("trainer.lr=4e-4", "trainer.warmup_steps=0"),
    *("evaluation.every_steps=0", "evaluation.max_prompts=64"),
]
OF_TOOL = ["trainer.groups_per_step=16", "sampling.max_tokens=128"]


def fours(folder: Path) -> Path:
    """The recipe with its sums of four numbers only."""
    return part_of(RECIPE, folder, "+", 3)


def triples(folder: Path) -> Path:
    """The recipe of the tool with its products of three numbers, which its checkpoint guesses."""
    return part_of(TOOLS_RECIPE, folder, "*", 2)


def part_of(source: Path, folder: Path, sign: str, num_signs: int) -> Path:
    recipe = folder / "recipe"
    shutil.copytree(source, recipe)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        rows = read_lines(recipe / name)
        write_lines(recipe / name, [r for r in rows if r["question"].count(sign) == num_signs])
    return recipe


def shuffle_answers(recipe: Path) -> None:
    rows = read_lines(recipe / "prompts.jsonl")
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    shuffled = [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]
    write_lines(recipe / "prompts.jsonl", shuffled)


def train(
    forks: Forks, recipe: Path, run_dir: Path, *overrides: str
) -> tuple[dict[str, float], list[float]]:
    """(the summary, the mean reward of every step)."""
    done = forks.run("train", f"--config-dir={recipe}", *SHORT, *overrides, f"run_dir={run_dir}")
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
    shuffle_answers(recipe)
    summary, rewards = train(forks, recipe, tmp_path / "run")
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] < 0.4  # six seeds: 0.02 to 0.16
    assert max(rewards) < 0.1


@pytest.mark.long
def test_half_as_many_rollouts_in_two_passes_of_two_mini_batches_learn(
    forks: Forks, tmp_path: Path
) -> None:
    several = [
        *("trainer.groups_per_step=6", "trainer.num_mini_batches=2", "trainer.num_passes=2"),
        *("num_steps=12", "staleness.max_staleness=3", "evaluation.every_steps=0"),
        *("algorithm=ppo", "algorithm.filters=[equal_rewards]", "algorithm.proximal=recompute"),
        "checkpoint.every_steps=7",
    ]
    run_dir = tmp_path / "run"
    command = ["train", f"--config-dir={fours(tmp_path)}", *SHORT, *several, f"run_dir={run_dir}"]
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] > 0.5  # three seeds: 0.80 to 0.91
    assert summary["steps"] == 12
    assert summary["staleness_max"] <= 3
    told = compare([str(run_dir), str(run_dir), "--output", str(tmp_path / "c.svg")])
    assert f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}" in told
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "trainer/loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 13)]
    first_steps = [line["trained/clipped_share"] for line in steps[::4]]
    assert first_steps == [0, 0, 0], "before the first step of a batch pi is prox"
    assert max(line["trained/clipped_share"] for line in steps) > 0
    trained = [row for row in read_rollouts(run_dir) if row["outcome"] == "trained"]
    assert {row["num_uses"] for row in trained} == {2}
    by_version = Counter(row["version"] for row in trained)
    # The last of the two uses; 6 groups each.
    assert [*by_version] == [2, 3, 6, 7, 10, 11]
    assert len({*by_version.values()}) == 1
    # 7 is due amid a batch.
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    assert len(saved) == 2
    assert "8" in saved[0]
    assert "12" in saved[1]


@pytest.mark.long
def test_a_short_run_learns_to_call_the_tool(forks: Forks, tmp_path: Path) -> None:
    summary, _ = train(forks, triples(tmp_path), tmp_path / "run", *OF_TOOL)
    assert summary["accuracy_before"] < 0.2
    assert summary["accuracy_after"] > 0.7
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    calls = [each["tool_calls/calculator"] for each in records if "tool_calls/calculator" in each]
    assert calls[-1] > 1.5 * calls[0]


@pytest.mark.long
@pytest.mark.parametrize("control", ["without the tool", "no learning rate", "shuffled answers"])
def test_the_same_run_with_the_tool_must_not_learn(
    forks: Forks, tmp_path: Path, control: str
) -> None:
    recipe = triples(tmp_path)
    overrides = {"no learning rate": ["trainer.lr=0"], "without the tool": ["environment.tools=[]"]}
    if control == "shuffled answers":
        shuffle_answers(recipe)
    more = overrides.get(control, [])
    summary, _ = train(forks, recipe, tmp_path / "run", *OF_TOOL, *more)
    assert summary["accuracy_after"] < 0.3
