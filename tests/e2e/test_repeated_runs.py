"""What a run's folder says of what ran, and running that again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from llamarl.view.compare import compare
from tests.e2e.forks import Forks
from tests.places import RECIPE

SMALL = [
    "cluster=inline",
    "num_steps=1",
    "staleness.max_staleness=0",
    "trainer.groups_per_step=2",
    "trainer.warmup_steps=0",
    "checkpoint.export=false",
    "metrics.trackers=[]",
]
LENGTH = "def score(text):\n    return len(text) % {}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a reward of two files."""
    folder = tmp_path_factory.mktemp("recipes") / "own"
    folder.mkdir()
    shutil.copytree(RECIPE / "checkpoint", folder / "checkpoint")
    shutil.copy(RECIPE / "prompts.jsonl", folder)
    (folder / "run.yaml").write_text(
        "defaults: [config, {override /algorithm: aipo}, _self_]\n"
        "model: {checkpoint: checkpoint}\n"
        "data: {prompts: prompts.jsonl}\n"
        "reward: {functions: [task, format], weights: [1, 0.5]}\n"
        "sampling: {max_tokens: 8, rollouts_per_prompt: 4}\n"
        "generator: {max_model_len: 128}\n"
    )
    (folder / "task.py").write_text(
        "from own_score import score\ndef reward(prompt, completion): return score(completion)\n"
    )
    (folder / "own_score.py").write_text(LENGTH.format(7))
    return folder


def run(forks: Forks, folder: Path, run_dir: Path, *more: str) -> str:
    done = forks.run("train", f"--config-dir={folder}", f"run_dir={run_dir}", *more)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def last_step(run_dir: Path) -> dict[str, object]:
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {tag: line[tag] for tag in ("reward/mean", "loss/policy", "length/mean") if tag in line}


def test_the_folder_says_what_ran_and_repeats_it_whatever_the_recipe_has_become(
    forks: Forks, recipe: Path, tmp_path: Path
) -> None:
    first, again, other = tmp_path / "first", tmp_path / "again", tmp_path / "other"
    run(forks, recipe, first, *SMALL, "algorithm=grpo")
    written = yaml.safe_load((first / "config.yaml").read_text())
    choices = {key: name for each in written["defaults"][1:-1] for key, name in each.items()}
    assert choices == {
        "override /algorithm": "grpo",
        "override /cluster": "inline",
        "override /data": "plain",
        "override /generator": "embedded",
        "override /model": "checkpoint",
        "override /placement": "disaggregated",
        "override /trainer": "native",
        "override /weights": "shared_memory",
    }
    digests = json.loads((first / "environment.json").read_text())["recipe"]["sha256"]
    assert {*digests} == {"run.yaml", "task.py", "own_score.py"}
    for name, digest in digests.items():
        kept = (first / "recipe" / name).read_bytes()
        assert kept == (recipe / name).read_bytes()
        assert digest == hashlib.sha256(kept).hexdigest()
    (recipe / "own_score.py").write_text(LENGTH.format(5))
    moved = first.rename(tmp_path / "moved")
    run(forks, moved, again)
    assert last_step(again) == last_step(moved)
    run(forks, recipe, other, *SMALL, "algorithm=grpo")
    assert last_step(other) != last_step(moved)
    said = compare([str(moved), str(other), "--output", str(tmp_path / "c.svg")])
    assert "own_score.py" in said
    assert "task.py  " not in said
    assert "equal" in compare([str(moved), str(again), "--output", str(tmp_path / "c.svg")])


@pytest.mark.long
def test_a_run_resumes_on_another_day_and_keeps_the_task_that_it_had_before(
    forks: Forks, recipe: Path, tmp_path: Path
) -> None:
    """The template says the day; as if the run had been started two years ago."""
    run_dir = tmp_path / "run"
    (recipe / "own_score.py").write_text(LENGTH.format(7))
    (recipe / "own.jinja").write_text("{{ strftime_now('%d') }}{{ messages[0].content }}=")
    own = [*SMALL, "data.chat=true", "data.chat_template=own.jinja", "checkpoint.resume=auto"]
    run(forks, recipe, run_dir, *own, "data.date=2024-07-26")
    (recipe / "own_score.py").write_text(LENGTH.format(3))
    said = run(forks, recipe, run_dir, *own, "num_steps=2")
    assert "resumed from version 1" in said
    assert "WARNING own_score.py: changed since this run was last started" in said
    assert (run_dir / "recipe" / "own_score.py").read_text() == LENGTH.format(3)
    assert (run_dir / "recipe-1" / "own_score.py").read_text() == LENGTH.format(7)
    kept = run_dir / "tokenizer" / "chat_template.jinja"
    assert kept.read_text() == (recipe / "own.jinja").read_text()
