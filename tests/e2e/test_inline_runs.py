"""Runs of the recipe in one process: commands, failures and what they leave."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.model.safetensors_file import read_header
from llamarl.view.page import view
from tests.e2e.commands import read_archive, read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import CHECKPOINT, RECIPE

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    "cluster=inline",
    "num_steps=2",
    "trainer.groups_per_step=4",
    "trainer.warmup_steps=0",
    "evaluation.max_prompts=4",
    "evaluation.every_steps=0",
    "checkpoint.export=false",
    "experience.keep_rollouts=0",
]
RESUME = "checkpoint.resume=auto"


@pytest.fixture
def llamarl(forks: Forks) -> Command:
    """Runs a command on a recipe with overrides."""

    def run(command: str, recipe: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
        return forks.run(command, f"--config-dir={recipe}", *overrides)

    return run


def test_a_colocated_run_gives_the_same_bits_with_and_without_offloading(
    llamarl: Command, tmp_path: Path
) -> None:
    exports = {}
    for offload in ("file", "none"):
        done = llamarl(
            "train",
            RECIPE,
            *SMALL,
            "staleness.max_staleness=0",
            "placement=colocated",
            f"placement.offload={offload}",
            "data.held_out=null",
            "checkpoint.export=true",
            f"run_dir={tmp_path / offload}",
        )
        assert done.returncode == 0, done.stderr
        exports[offload] = (tmp_path / offload / "export" / "model.safetensors").read_bytes()
        summary = json.loads((tmp_path / offload / "summary.json").read_text())
        assert summary["both_busy_share"] == 0
    assert exports["file"] == exports["none"]
    start = (RECIPE / "checkpoint" / "model.safetensors").read_bytes()
    assert exports["file"][-1000:] != start[-1000:], "nothing was trained"


def test_evaluate_scores_a_checkpoint(llamarl: Command, tmp_path: Path) -> None:
    done = llamarl(
        "evaluate", RECIPE, "cluster=inline", "evaluation.max_prompts=32", f"run_dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"accuracy \d+\.\d% of 32 \(\d+\.\d% to \d+\.\d%\)  reward ", done.stdout)
    assert done.stdout.endswith(f"llamarl view {tmp_path}\n")
    assert view([str(tmp_path)]) == f"32 rollouts: {tmp_path}/view.html\n"
    asked = read_lines(RECIPE / "held_out.jsonl")
    lines = read_rollouts(tmp_path)
    assert sorted(line["prompt_id"] for line in lines) == [*range(1, 33)]
    for line in lines:
        assert line["prompt"] == asked[line["prompt_id"] - 1]["question"]
        assert line["correct"] == line["completion"].endswith(
            "Answer: " + asked[line["prompt_id"] - 1]["answer"]
        )


def test_the_archive_has_whole_rollouts_where_asked(llamarl: Command, tmp_path: Path) -> None:
    keep = "experience.keep_rollouts=1"
    done = llamarl("train", RECIPE, *SMALL, keep, f"run_dir={tmp_path}", "num_steps=1")
    assert done.returncode == 0, done.stderr
    for line in read_rollouts(tmp_path):
        is_kept = line["outcome"] in ("evaluated", "trained")
        assert ("completion" in line) == ("generator_logprobs" in line) == is_kept
        if "loss_weights" in line:
            log_pi, log_mu = line["trainer_logprobs"], line["generator_logprobs"]
            assert line["advantage"] != 0
            assert line["staleness"] == line["version"] - line["version_min"]
            assert len(log_pi) == len(log_mu) == len(line["clipped"]) == line["num_tokens"]


def test_an_export_in_bfloat16_is_half_the_size_and_scores(
    llamarl: Command, tmp_path: Path
) -> None:
    exporting = ["checkpoint.export=true", "checkpoint.export_dtype=bfloat16", "num_steps=1"]
    done = llamarl("train", RECIPE, *SMALL, *exporting, f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    weights = tmp_path / "run" / "export" / "model.safetensors"
    whole = (RECIPE / "checkpoint" / "model.safetensors").stat().st_size
    assert {entry.dtype for entry in read_header(weights).values()} == {"BF16"}
    assert weights.stat().st_size == pytest.approx(whole / 2, rel=0.01)
    checkpoint = f"model.checkpoint={weights.parent}"
    scored = llamarl("evaluate", RECIPE, *SMALL, checkpoint, f"run_dir={tmp_path / 'scored'}")
    assert scored.returncode == 0, scored.stderr
    assert scored.stdout.startswith("accuracy ")


@pytest.mark.long
def test_multirun_makes_one_folder_per_combination(llamarl: Command, tmp_path: Path) -> None:
    done = llamarl(
        "train",
        RECIPE,
        *SMALL,
        "--multirun",
        "seed=0,1",
        f"run_dir={tmp_path}",
        "num_steps=1",
        "data.held_out=null",
    )
    assert done.returncode == 0, done.stderr
    for job in ("0", "1"):
        assert json.loads((tmp_path / job / "summary.json").read_text())["steps"] == 1
        words = shlex.split((tmp_path / job / "command.txt").read_text().partition(" && ")[2])
        assert shutil.which(words[0]), "the program is found without an activated environment"
        assert {"num_steps=1", f"seed={job}", f"run_dir='{tmp_path / job}'"} <= set(words)
        assert not {"--multirun", "seed=0,1", f"run_dir={tmp_path}"} & set(words)


def test_a_users_own_task_is_rewarded_by_its_code(llamarl: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "task.py").write_text(
        "def reward(prompt, completion):\n"
        "    print('asked', prompt.fields['question'])\n"
        "    return float('Answer' in completion and len(completion) % 2 == 0)\n"
    )
    (recipe / "prompts.jsonl").write_text('{"question": "What is 5+8?", "answer": "13"}\n' * 3)
    (recipe / "run.yaml").write_text(
        "defaults: [config, {override /reward: task}, _self_]\n"
        f"model: {{checkpoint: {RECIPE / 'checkpoint'}}}\n"
        "data: {prompts: prompts.jsonl}\n"
        "sampling: {max_tokens: 64}\n"
        "generator: {max_model_len: 128}\n"
        "algorithm: {filters: []}\n"
    )
    done = llamarl("train", recipe, *SMALL, f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    rewards = {line["reward"] for line in read_archive(tmp_path / "run")}
    assert rewards <= {0.0, 1.0, None}
    assert 1.0 in rewards
    kept = (tmp_path / "run" / "logs" / "controller.log").read_text()
    for shown in ("asked What is 5+8?", "step 2/2", "llamarl: done"):
        assert shown in done.stdout
        assert shown in kept


@pytest.mark.long
def test_a_run_that_diverges_ends_in_one_line(llamarl: Command, tmp_path: Path) -> None:
    steep = "trainer.lr=100", "trainer.warmup_steps=0", "num_steps=4"
    done = llamarl("train", RECIPE, *SMALL, *steep, f"run_dir={tmp_path}")
    assert done.returncode == 2
    assert "llamarl: the " in done.stderr
    assert "check trainer.lr" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_full_disk_at_the_end_is_one_line_leaves_the_checkpoint_and_can_be_made_up_for(
    llamarl: Command, tmp_path: Path
) -> None:
    (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
    done = llamarl("train", RECIPE, *SMALL, f"run_dir={tmp_path}")
    assert done.returncode == 2
    complaint, saved, command = done.stderr.splitlines()
    assert "run_dir must be on a disk with room" in complaint
    assert "version 2 is saved in" in saved
    assert command.endswith("checkpoint.resume=auto")
    assert not (tmp_path / "summary.json").exists()
    for line in read_rollouts(tmp_path):
        assert ("completion" in line) == (line["outcome"] == "evaluated")
        assert "generator_logprobs" not in line
    # What is still owed is made up for by a resume, which does no step twice.
    (tmp_path / "summary.json.tmp").unlink()
    again = llamarl("train", RECIPE, *SMALL, f"run_dir={tmp_path}", "checkpoint.resume=auto")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["rollouts_trained"] == 2 * 4 * 8
    # Now that it is finished, it is not done again, and no other run takes its place.
    again = llamarl("train", RECIPE, *SMALL, f"run_dir={tmp_path}", RESUME)
    assert again.returncode == 0
    assert "finished before: nothing was started" in again.stdout
    assert "starting the executors" not in again.stdout
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    third = llamarl("train", RECIPE, *SMALL, f"run_dir={tmp_path}")
    assert third.returncode == 2
    assert "run_dir must be a new folder" in third.stderr
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    assert after == before


def test_a_failure_shows_its_own_traceback_once(llamarl: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    (recipe / "task.py").write_text("def reward(prompt, completion):\n    return 1 / 0\n")
    task = ["reward.functions=[task]", "data.held_out=null"]
    done = llamarl("train", recipe, *SMALL, *task, "num_steps=9", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert done.stderr.count("may fail (reward.max_failure_rate)") == 1, done.stderr
    assert done.stderr.count("return 1 / 0") == 1
    assert "llamarl/" not in done.stderr, "frames of ours say nothing about the recipe's code"


def test_the_help_names_the_commands(forks: Forks) -> None:
    done = forks.run("--help")
    assert done.returncode == 0
    assert {"train", "evaluate"} <= {*done.stdout.split()}


def test_a_run_folder_belongs_to_one_run(llamarl: Command, tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = llamarl("train", RECIPE, *SMALL, f"run_dir={tmp_path}")
        assert done.returncode == 2
        assert "where another is at work" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("algorithm.rho=0.5", "algorithm.rho must be at least 1"),
        ("checkpoint.resume=/nowhere", "checkpoint.resume must be off, auto or a folder called"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_only_a_folder_that_the_user_made(
    wrong: str, words: str, llamarl: Command, tmp_path: Path
) -> None:
    """Whether composing finds it, or the run before it starts a process; tests/recipe has more."""
    for folder in (tmp_path / "new", tmp_path):
        done = llamarl("train", RECIPE, wrong, f"run_dir={folder}")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"llamarl: {words}")
        assert "starting" not in done.stdout
    assert list(tmp_path.iterdir()) == []


LINGERING = """
import atexit, threading, time

threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(time.sleep, 600)

def reward(prompt, completion):
    return float(len(completion) % 3)

def advantages(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]
"""


@pytest.mark.long
def test_a_finished_run_ends_whatever_task_py_has_started(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    (recipe / "task.py").write_text(LINGERING)
    own = ["reward.functions=[task]", "algorithm.advantage=task", "data.held_out=null"]
    command = [sys.executable, "-m", "llamarl", "train", f"--config-dir={recipe}", *SMALL, *own]
    done = subprocess.run(
        [*command, "num_steps=1", f"run_dir={tmp_path}/run"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "llamarl: done" in done.stdout


def test_a_new_recipe_trains(forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    inputs = [f"--model={CHECKPOINT}", f"--data={RECIPE / 'prompts.jsonl'}"]
    inputs += [f"--held-out={RECIPE / 'held_out.jsonl'}", "--reward=task", "--device=cpu"]
    made = forks.run("new", str(folder), *inputs)
    assert made.returncode == 0, made.stderr
    said = made.stdout.splitlines()
    (command,) = [shlex.split(line) for line in said if line.startswith("try it:")]
    own = [f"run_dir={tmp_path}/run", *SMALL, "checkpoint.export=true"]
    done = forks.run(*command[command.index("train") :], *own)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
