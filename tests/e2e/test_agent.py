"""A program that asks an OpenAI-compatible server for its turns gets the tokens that tools get."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.records import NO_VERSION
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.e2e.test_tools_exact import SMALL, check, questions
from tests.places import TOOLS_RECIPE

TASK = Path(__file__).with_name("agent_task.py")
ONE_STEP = ["num_steps=1", "trainer.groups_per_step=8", "evaluation.max_prompts=4"]


def tokens(forks: Forks, recipe: Path, run_dir: Path, *overrides: str) -> dict[Any, Any]:
    """What was written, shown and rewarded, by rollout, when each token is what it should be;
    log-probs differ in their last bits."""
    done = forks.run(
        "train", f"--config-dir={recipe}", f"run_dir={run_dir}", *SMALL, *ONE_STEP, *overrides
    )
    assert done.returncode == 0, done.stderr
    rows, found = questions(), {}
    for line in read_rollouts(run_dir):
        if line["outcome"] in rows:
            check(line, rows[line["outcome"]])
            names = "prompt_ids", "response_ids", "token_versions", "reward", "finish"
            found[line["outcome"], line["row_id"]] = [line[name] for name in names]
    return found


@pytest.mark.long
def test_a_program_of_ones_own_plays_the_very_episodes_of_the_tools_recipe(
    forks: Forks, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    shutil.copy(TASK, recipe / "task.py")
    played = tokens(forks, recipe, tmp_path / "played", "reward.functions=[environment]")
    called = tokens(forks, TOOLS_RECIPE, tmp_path / "called")
    assert len(called) >= 60
    assert played == called
    num_observed = [versions.count(NO_VERSION) for _, _, versions, *_ in called.values()]
    assert sum(number > 0 for number in num_observed) > 20, "many took a turn with the tool"
