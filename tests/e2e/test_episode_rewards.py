"""Several rewards that read an episode keep their names and weights in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_rehearsal import write_environment_recipe
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.recipe.test_mistakes import mistake

REWARDS = """
def right(prompt, messages, environment):
    return float(environment.target == int(prompt.fields["answer"]))

async def brief(prompt, messages, environment):
    return -float(len(messages))

episode_rewards = [right, brief]
"""
ANSWERED = 'self.target = int(row["answer"])'


def write_recipe(folder: Path) -> Path:
    write_environment_recipe(folder)
    text = (folder / "task.py").read_text().replace("self.target = int(target)", ANSWERED)
    (folder / "task.py").write_text(text + REWARDS)
    return folder


def test_each_has_its_metric_and_its_weight(forks: Forks, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    done = forks.run(
        *("train", f"--config-dir={recipe}", "cluster=inline", f"run_dir={tmp_path / 'run'}"),
        "reward.functions=[environment.brief,environment,environment.right]",
        *("reward.weights=[0.5,10,100]", "algorithm.advantage=gdpo"),
        *("trainer.parts=batch", "num_steps=1", "trainer.groups_per_step=2"),
        *("trainer.warmup_steps=0", "evaluation.max_prompts=2", "checkpoint.export=false"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [
        line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line
    ]
    (step,) = lines
    parts = {name: step[f"reward_parts/{name}"] for name in ("environment", "environment.right")}
    assert parts == {"environment": 1.0, "environment.right": 1.0}
    brief = step["reward_parts/environment.brief"]
    assert brief <= -2
    assert step["reward/mean"] == pytest.approx(0.5 * brief + 10 + 100)


def test_one_that_is_not_there_or_named_twice_is_refused_in_one_line(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe")
    done = forks.run(
        *("train", f"--config-dir={recipe}", "cluster=inline", f"run_dir={tmp_path / 'run'}"),
        *("reward.functions=[environment.righty]", "num_steps=1"),
    )
    assert done.returncode == 2
    assert "must be one of right, brief, got 'righty' (did you mean right?)" in done.stderr
    twice = "reward.functions=[environment.brief,environment.brief]"
    assert "name each function of episode_rewards once" in mistake(
        recipe, twice, "reward.weights=[1,1]"
    )
