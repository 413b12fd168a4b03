"""A run on a folder of tasks in Harbor's form, in each sandbox that can hold them: the rewards that
it keeps are those that the tests of each task give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.containers import make_engine
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.harbor_tasks import write_task
from tests.places import ROOT

RECIPE = ROOT / "recipes" / "quickstart_agent"
IMAGE = "tests/task:1"
NO_BWRAP = shutil.which("bwrap") is None
TOML = f"""
[verifier]
timeout_sec = 20.0
[environment]
docker_image = "{IMAGE}"
allow_internet = false
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\n"
TEST = """#!/bin/bash
if [ "$(cat answer.txt)" = {answer} ]; then
  echo '{{"reward": {right}}}' > /logs/verifier/reward.json
fi
echo {wrong} > /logs/verifier/reward.txt
"""
TASKS = {
    "a": {"question": "What is 70*39?", "answer": 2730, "right": 1, "wrong": 0.125},
    "b": {"question": "What is 51*58*44?", "answer": 130152, "right": 0.5, "wrong": -0.25},
}
SETTINGS = [
    *("cluster=inline", "num_steps=1", "trainer.groups_per_step=2", "data.held_out=null"),
    *("sampling.rollouts_per_prompt=4", "experience.keep_rollouts=1", "checkpoint.export=false"),
    *("environment.check_command=[]", "environment.check_files=null"),
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name, task in TASKS.items():
        write_task(
            tmp_path / "tasks" / name,
            toml=TOML,
            dockerfile=DOCKERFILE,
            test=TEST.format(**task),
            instruction=str(task["question"]),
        )
    return tmp_path / "tasks"


def settings(tmp_path: Path, tasks: Path, place: str) -> list[str]:
    """Return the arguments of a run with these tasks in a sandbox of this kind."""
    python = "python3" if place == "docker" else "{python}"
    command = f"environment.command=['{python}',/agent/agent.py,'{{question}}']"
    found = [f"--config-dir={RECIPE}", f"run_dir={tmp_path / 'run'}", *SETTINGS, command]
    if place == "docker":
        engine = make_engine(tmp_path / "engine", {IMAGE: {"config": {"WorkingDir": "/app"}}})
        found += [f"environment.engine={engine}", "environment.image='{image}'"]
        found += ["environment.sandbox=docker"]
    return [*found, f"data.prompts={tasks}"]


@pytest.mark.skipif(NO_BWRAP, reason="this Linux has no bubblewrap")
@pytest.mark.parametrize("place", ["local", "docker"])
def test_rewards_are_those_of_the_tasks_tests(
    forks: Forks, tmp_path: Path, tasks: Path, place: str
) -> None:
    done = forks.run("train", *settings(tmp_path, tasks, place))
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_rollouts(tmp_path / "run") if line["outcome"] == "trained"]
    assert len(lines) == 8
    assert {line["prompt_id"] for line in lines} == {1, 2}
    for line in lines:
        task = TASKS["ab"[line["prompt_id"] - 1]]
        said = line["turns"][-1]["content"]
        is_right = said == f"Answer: {task['answer']}"
        assert line["reward"] == task["right" if is_right else "wrong"]
        fields = json.loads(line["fields"]) if isinstance(line["fields"], str) else line["fields"]
        assert fields == {
            "question": task["question"],
            "task": "ab"[line["prompt_id"] - 1],
            "image": IMAGE,
        }


def test_what_tasks_and_sandbox_need_is_one_line_before_the_run(
    forks: Forks, tmp_path: Path, tasks: Path
) -> None:
    def refused(place: str, *overrides: str) -> str:
        shutil.rmtree(tmp_path / "engine", ignore_errors=True)
        done = forks.run("train", *settings(tmp_path, tasks, place), *overrides)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.strip().splitlines()
        return str(line)

    words = "environment.timeout_s must be at least the 20 s that the tests of a may take"
    assert words in refused("local", "environment.timeout_s=5")
    assert "must be left out, as the task a" in refused("local", "environment.check_command=[a]")
    assert "must name images that are on this machine" in refused(
        "docker", "environment.image=none:1"
    )
    words = "environment.sandbox must be local where the engine of containers cannot be reached, "
    words += "got docker: /nowhere/docker ps must succeed, got: it is not installed"
    assert words in refused("docker", "environment.engine=/nowhere/docker")
    shutil.rmtree(tmp_path / "engine")
    nowhere = [*settings(tmp_path, tasks, "docker"), "environment.engine=/nowhere/docker"]
    assert words in forks.run("check", *nowhere).stdout
    assert "must name an image with environment.sandbox=docker" in refused(
        "local", "environment.sandbox=docker"
    )
    assert "environment.internet must be false without" in refused(
        "local", "environment.internet=true"
    )
    (tasks / "b" / "environment" / "Dockerfile").write_text("FROM a\nWORKDIR /app\nRUN make\n")
    words = "environment.sandbox must be docker for the task b, as its Dockerfile has RUN make"
    assert words in refused("local")
    (tasks / "b" / "task.toml").write_text("[verifier\n")
    assert "b/task.toml must be a readable TOML file" in refused("local")


@pytest.mark.skipif(NO_BWRAP, reason="this Linux has no bubblewrap")
def test_tasks_that_may_want_the_internet_are_told_that_there_is_none(
    forks: Forks, tmp_path: Path, tasks: Path
) -> None:
    (tasks / "b" / "task.toml").write_text(TOML.replace("allow_internet = false\n", ""))
    done = forks.run("train", *settings(tmp_path, tasks, "local"))
    assert "1 tasks may use the internet, such as b, which their sandboxes" in done.stdout


@pytest.mark.skipif(NO_BWRAP, reason="this Linux has no bubblewrap")
def test_a_run_resumes_with_the_same_tasks_and_refuses_others(
    forks: Forks, tmp_path: Path, tasks: Path
) -> None:
    common = [*settings(tmp_path, tasks, "local"), "checkpoint.every_steps=1"]
    common += ["checkpoint.resume=auto"]
    assert forks.run("train", *common).returncode == 0
    done = forks.run("train", *common, "num_steps=2")
    assert done.returncode == 0, done.stderr
    (tasks / "a" / "instruction.md").write_text("What is 2*3?")
    done = forks.run("train", *common, "num_steps=3")
    assert done.returncode == 2
    assert "data.prompts" in done.stderr
