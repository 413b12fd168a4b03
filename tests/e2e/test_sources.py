"""A run on several sources of prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines, write_lines
from tests.places import RECIPE

SMALL = [
    "cluster=inline",
    "trainer.groups_per_step=4",
    "trainer.warmup_steps=0",
    "data.held_out=null",
    "checkpoint.export=false",
    "experience.keep_rollouts=1",
    "checkpoint.resume=auto",
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The quickstart with 6 prompts of its file and 3 as verl has them."""
    folder = tmp_path / "recipe"
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("prompts.jsonl"))
    rows = read_lines(RECIPE / "prompts.jsonl")
    write_lines(folder / "own.jsonl", rows[:6])
    of_verl = [
        {
            "data_source": "sums",
            "prompt": row["question"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for row in rows[6:9]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(of_verl), folder / "verl.parquet")
    return folder


def train(
    forks: Forks, recipe: Path, run_dir: Path, *overrides: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The summary, and what the command said."""
    own = ["data.prompts=[own.jsonl,verl.parquet]", f"run_dir={run_dir}", *overrides]
    done = forks.run("train", f"--config-dir={recipe}", *SMALL, *own)
    assert done.returncode == 0, done.stderr
    return json.loads((run_dir / "summary.json").read_text()), done


@pytest.mark.long
def test_a_run_on_weighted_sources_goes_on_where_it_was_and_ends_with_its_epochs(
    forks: Forks, recipe: Path, tmp_path: Path
) -> None:
    own = ["data.weights=[1,2]", "algorithm.filters=[]", "algorithm.advantage=mean"]
    run_dir = tmp_path / "run"
    summary, _ = train(forks, recipe, run_dir, *own, "num_steps=1")
    assert summary["ended_by"] == "num_steps=1"
    summary, done = train(forks, recipe, run_dir, *own, "num_epochs=1")
    assert "resumed from version 1" in done.stdout
    assert summary["steps"] == 2, "9 prompts are 2 steps of 4"
    assert summary["ended_by"] == "num_epochs=1"
    assert summary["sources"].keys() == {"own", "verl"}
    numbers = summary["sources"]["verl"]
    assert numbers.keys() == {"groups", "dropped_share", "reward", "length"}
    assert sum(each["groups"] for each in summary["sources"].values()) == 8
    assert "of verl" in done.stdout
    trained = [line for line in read_rollouts(run_dir) if line["outcome"] == "trained"]
    places = {(each["prompt_file"], each["prompt_id"], each["epoch"]) for each in trained}
    assert len(places) == 8
    files = Counter(file for file, _, _ in places)
    assert abs(files["own.jsonl"] - 8 / 3) <= 1
    assert {epoch for file, _, epoch in places if file == "verl.parquet"} == {0, 1}
    assert {number for file, number, _ in places if file == "verl.parquet"} == {1, 2, 3}
