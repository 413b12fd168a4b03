"""Stages of a recipe's own in a whole run: what they break is counted, and nothing else stops."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import ROOT

RUN = """
defaults: [config, _self_]
num_steps: 3
model: {checkpoint: ../quickstart/checkpoint}
data: {prompts: ../quickstart/prompts.jsonl}
sampling: {max_tokens: 96}
generator: {max_model_len: 128}
trainer: {groups_per_step: 8, warmup_steps: 0}
reward: {functions: [exact], require_stop: false}
checkpoint: {export: false}
experience: {stages: [judge, pick], units_per_host: 2, max_bytes: 20000}
algorithm: {reward_columns: [reward, quality, share], reward_column_weights: [1.0, 0.1, 0.1]}
"""
TASK = """
import os, time
from llamarl.scoring.stages import Drop, Stage

def judge(prompt, completion):
    chance = hash(completion) % 40
    if chance == 0:
        raise LookupError(completion)
    if chance == 1:
        time.sleep(100)
    if chance == 2:
        os._exit(3)
    return Drop("third") if chance % 3 == 0 else float(chance)

def pick(quality):
    least = min(quality)
    return [Drop("least") if each == least else each / sum(quality) for each in quality]

stages = [
    Stage("judge", judge, reads=["prompt", "completion"], writes=["quality"], workers=2,
          timeout_s=0.5, max_failure_rate=1.0),
    Stage("pick", pick, reads=["quality"], writes=["share"], per="group"),
]
"""


@pytest.mark.slow
def test_a_run_goes_on_past_calls_that_raise_hang_and_end_their_process(
    tmp_path: Path, forks: Forks
) -> None:
    recipe = tmp_path / "recipes" / "mine"
    recipe.mkdir(parents=True)
    (tmp_path / "recipes" / "quickstart").symlink_to(ROOT / "recipes" / "quickstart")
    (recipe / "run.yaml").write_text(RUN)
    (recipe / "task.py").write_text(TASK)
    done = forks.run("train", "--config-dir=recipes/mine", "run_dir=run", where=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for path in (tmp_path / "run" / "archive").glob("rollouts-*.jsonl")
        for line in path.open()
    ]
    outcomes = Counter(line["row_id"] for line in lines)
    assert set(outcomes.values()) == {1}, "every rollout has one outcome"
    dropped = Counter(line.get("reason") for line in lines if line["outcome"] == "dropped")
    assert dropped["third"] > 5
    assert dropped["judge_failed"] > 0
    assert dropped["least"] > 5
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(step.get("dropped_rollouts/judge_failed", 0) for step in steps) > 0
    assert [step["step"] for step in steps][-1] == 3
    assert not list((tmp_path / "run").glob("spill/*")), "what went to disk was trained and is gone"
