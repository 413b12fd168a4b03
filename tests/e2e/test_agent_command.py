"""The recipe whose episodes a program plays in a sandbox, as it is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import ROOT

RECIPE = ROOT / "recipes" / "quickstart_agent"
SMALL = [
    *("cluster=inline", "num_steps=1", "trainer.groups_per_step=2", "evaluation.max_prompts=2"),
    *("sampling.rollouts_per_prompt=4", "experience.keep_rollouts=1", "checkpoint.export=false"),
]


def test_a_program_plays_episodes_that_are_scored_by_its_files(
    forks: Forks, tmp_path: Path
) -> None:
    common = f"--config-dir={RECIPE}", f"run_dir={tmp_path}"
    done = forks.run("train", *common, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_rollouts(tmp_path) if line["outcome"] == "trained"]
    assert len(lines) == 8
    answers = {
        n: row["answer"]
        for n, row in enumerate(
            read_lines(ROOT / "recipes" / "quickstart_tools" / "prompts.jsonl"), start=1
        )
    }
    for line in lines:
        said = line["turns"][-1]["content"]
        assert line["reward"] == (said == f"Answer: {answers[line['prompt_id']]}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.files=nothing"], "environment.files must be a folder, got"),
        (["environment.command=['{nothing}']"], "environment.command must name fields of the"),
        (["environment.check_command=['{']"], "environment.check_command must name fields of the"),
        (["environment.command=[]"], "environment.command must name a program with"),
        (["environment.tools=[task,agent]"], "environment.tools must have agent alone"),
        (["environment.tools=[]"], "environment.command must name a program with"),
    ],
)
def test_what_the_recipe_names_wrongly_is_one_line(
    forks: Forks, tmp_path: Path, overrides: list[str], words: str
) -> None:
    done = forks.run("train", f"--config-dir={RECIPE}", f"run_dir={tmp_path}", *overrides)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert words in line


@pytest.mark.long
def test_the_model_learns_inside_the_program_and_not_without_a_learning_rate(
    forks: Forks, tmp_path: Path
) -> None:
    def accuracies(name: str, *overrides: str) -> list[float]:
        common = f"--config-dir={RECIPE}", f"run_dir={tmp_path / name}"
        done = forks.run("train", *common, *overrides)
        assert done.returncode == 0, done.stderr
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        return [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]

    first, last = accuracies("learns")
    assert first < 0.5
    assert last > 0.75
    control = accuracies("control", "trainer.lr=0", "num_steps=2")
    assert control[0] == control[1] == first
