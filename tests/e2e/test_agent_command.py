"""The recipe whose episodes a program plays in a sandbox, as it is shipped."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from llamarl.core.records import EPISODE_ROWS
from llamarl.scoring.sandbox.sandboxes import PREFIX
from tests.e2e.bad_agent import MARK
from tests.e2e.commands import finish, read_archive, read_rollouts, start
from tests.e2e.forks import Forks
from tests.json_lines import read_lines, write_lines
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


WAYS = {
    "good": "",
    "never": "play must ask for at least one message",
    "forever": "",
    "opens": "",
    "files": "too much disk",
    "prints": "",
    "forks": "",
    "bomb": "too much (processes|memory)",
    "memory": "too much memory",
    "sleeps": "environment.timeout_s",
    "stranger": "play must ask for at least one message",
}
"""Of each way to misbehave, what is in its error; empty if the episode has a reward."""


@pytest.mark.full
def test_agents_that_misbehave_are_bounded_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tempfile.mkdtemp(prefix="bad-")  # a short path, as those of sockets must be
    monkeypatch.setenv("TMPDIR", folder)
    recipe = tmp_path / "recipe"
    (recipe / "agent").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "bad_agent.py", recipe / "agent" / "agent.py")
    shutil.copytree(RECIPE / "check", recipe / "check")
    text = (RECIPE / "run.yaml").read_text().replace("../", f"{RECIPE.parent}/")
    (recipe / "run.yaml").write_text(text)
    rows = ({"question": way, "answer": "1", "way": way} for way in WAYS)
    held_out = write_lines(tmp_path / "held_out.jsonl", rows)
    command = start(
        "evaluate",
        f"--config-dir={recipe}",
        f"run_dir={tmp_path / 'run'}",
        "cluster=inline",
        f"data.held_out={held_out}",
        "environment.command=['{python}',agent.py,'{way}']",
        "environment.check_command=['{python}',-P,-c,'print(0.5)']",
        "environment.timeout_s=10",
        "environment.memory_mib=256",
        "environment.disk_mib=16",
        "environment.max_programs=4",
        "environment.max_conversations=6",
        "experience.keep_rollouts=1",
        "evaluation.max_prompts=0",
    )
    code, _, said = finish(command)
    assert code == 0, said
    lines = read_archive(tmp_path / "run")
    kept = read_lines(tmp_path / "run" / "archive" / "kept-0.jsonl")
    first = [line for line in kept if line["row_id"] < EPISODE_ROWS]
    found = {json.loads(line["fields"])["way"]: line for line in first}
    assert found.keys() == WAYS.keys()
    assert {line["outcome"] for line in lines} == {"evaluated"}
    for way, words in WAYS.items():
        assert re.search(words, found[way]["error"]), (way, found[way]["error"])
        assert bool(words) == (found[way]["reward"] is None), (way, found[way])
    numbers = {way: json.loads(line["numbers"]) for way, line in found.items()}
    assert numbers["opens"]["limited/conversations"] == 1
    assert numbers["opens"]["conversations"] == 6
    assert not command.wait_until_gone(10)
    assert not any(MARK.encode() in each for each in command_lines())
    assert not [*Path(folder).glob(f"{PREFIX}*")]
    shutil.rmtree(folder)


def command_lines() -> list[bytes]:
    """Of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return found


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
