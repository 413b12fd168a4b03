"""A process of every kind is killed while the run goes on, amid slow tools; real processes, token
by token. Chaos hits any process at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from llamarl.controller.control import SOCKET, ask
from tests.e2e.chaos import SMALL_RUN, Chaos
from tests.e2e.commands import (
    Command,
    executors,
    finish,
    newest_state,
    read_archive,
    read_rollouts,
    reward_workers,
    start,
    told_of,
    train,
    wait_for_other,
    wait_for_restart,
    wait_for_step,
    wait_until,
)
from tests.e2e.test_tools_exact import SMALL, check
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE
from tests.random_search import case, searched

ALONE = "generator-0", "environment-0", "scorer", "reference", "collector-0"
SESSION = "trainer", "storage-0"  # with these, all but the generators
OPTIONS = [
    *(each for each in SMALL if not each.startswith(("cluster", "num_steps"))),
    *("num_steps=100000", "environment.num_workers=2", "generator.num_collectors=1"),
    *("algorithm.kl_coefficient=0.01", "checkpoint.every_steps=1", "cluster.max_restarts=100"),
]
NUM_STEPS = 12
SLOW = """
    import time
    open({calls!r}, "a").write("x")
    time.sleep(0.2)
    left, right ="""


def slow_recipe(folder: Path) -> Path:
    """The recipe with a tool that takes a fifth of a second, and notes each call in a file."""
    recipe = folder / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    task = recipe / "task.py"
    slow = SLOW.format(calls=str(folder / "calls"))
    task.write_text(task.read_text().replace("    left, right =", slow))
    return recipe


def kill_amid_a_call(pid: int, folder: Path) -> None:
    """At once after an episode has called the tool of this folder's recipe."""
    calls = folder / "calls"
    num_calls, end_s = calls.stat().st_size, time.monotonic() + 60.0
    while calls.stat().st_size == num_calls:
        assert time.monotonic() < end_s, "no tool is called"
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_what_is_killed_amid_slow_tools_is_started_again_and_no_rollout_is_lost_or_wrong(
    tmp_path: Path,
) -> None:
    """The only replica, so that nothing goes on without the one in its place."""
    run_dir = tmp_path / "run"
    recipe = f"--config-dir={slow_recipe(tmp_path)}"
    command = start("train", recipe, f"run_dir={run_dir}", *OPTIONS)
    wait_for_step(command, run_dir, 2)
    workers = reward_workers(command.family())
    (worker, *_) = [pid for pid in workers if "environment" in told_of(pid, "cmdline")]
    kill_amid_a_call(worker, tmp_path)
    go_on(command, run_dir)
    # A plain tool has no state: its call is repeated, unless it was alone, and may be the cause.
    assert episode_restarts(run_dir) <= 1
    (trainer,) = executors(command, "trainer")
    for name in ALONE:
        num_restarts = episode_restarts(run_dir)
        (victim,) = executors(command, name)
        kill_amid_a_call(victim, tmp_path)
        wait_for_restart(command, run_dir, name)
        assert victim not in executors(command, name)
        go_on(command, run_dir)
        if name in ("generator-0", "environment-0"):
            assert episode_restarts(run_dir) > num_restarts
    assert executors(command, "trainer") == [trainer]
    generators = executors(command, "generator-0")
    before = [executors(command, name) for name in SESSION]
    for pids in before:
        os.kill(pids[0], signal.SIGKILL)
    for name, pids in zip(SESSION, before, strict=True):
        wait_for_other(command, name, pids)
    go_on(command, run_dir)
    assert executors(command, "generator-0") == generators
    command.process.send_signal(signal.SIGINT)
    code, out, err = finish(command)
    assert code == 130, err
    newest = max((run_dir / "checkpoints").glob("step-*"))
    version = newest_state(run_dir)["version"]
    said = ["llamarl: interrupted", f"llamarl: version {version} is saved in {newest}"]
    assert err.splitlines()[-3:-1] == said
    assert "Traceback" not in err
    assert " ".join(out.split()).count("the run goes on from step-") == 1
    assert command.wait_until_gone(5.0) == []
    assert not (run_dir / SOCKET).parent.exists()
    check_rollouts(run_dir)


def go_on(command: Command, run_dir: Path) -> None:
    """Wait for three steps more: with the last of them every episode under way now is trained."""
    wait_for_step(command, run_dir, len(read_lines(run_dir / "metrics.jsonl")) + 3)


def episode_restarts(run_dir: Path) -> float:
    return sum(line.get("episode/restarts", 0) for line in read_lines(run_dir / "metrics.jsonl"))


def check_rollouts(run_dir: Path) -> None:
    """Each has one outcome, every step its own, and their tokens are right."""
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "trainer/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    rollouts = read_rollouts(run_dir)
    outcomes = Counter(line["row_id"] for line in rollouts)
    assert set(outcomes.values()) == {1}
    rows = dict(enumerate(read_lines(TOOLS_RECIPE / "prompts.jsonl"), start=1))
    trained = [line for line in rollouts if line["outcome"] == "trained"]
    assert len(trained) == len(steps) * 6 * 8
    assert max(len(check(line, rows)) // 2 + 1 for line in trained) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "number", "settings"),
    [
        ("trainer", signal.SIGSTOP, ["trainer.num_ranks=2", "weights=collective"]),
        ("storage-1", signal.SIGKILL, ["experience.units_per_host=2", "generator.num_ranks=2"]),
        ("trainer", signal.SIGKILL, ["placement=colocated", "weights.staging=host"]),
        ("generator-0", signal.SIGKILL, ["placement=colocated"]),
    ],
)
def test_what_is_lost_beside_the_generators_is_started_again(
    role: str, number: signal.Signals, settings: list[str], tmp_path: Path
) -> None:
    command = train(
        tmp_path,
        f"num_steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        "cluster.liveness_timeout_s=10",
        *settings,
    )
    wait_for_step(command, tmp_path, 5)
    generators = executors(command, r"generator-\d")
    assert generators
    victim = executors(command, role)[-1]
    os.kill(victim, number)
    wait_for_step(command, tmp_path, NUM_STEPS)
    now = executors(command, r"generator-\d")
    assert len(now) == len(generators)
    assert {*generators} - {victim} <= {*now}
    code, out, err = finish(command)
    assert code == 0, err + out
    assert "Traceback" not in err
    assert "the run goes on from step-000000" in " ".join(out.split())
    rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == NUM_STEPS * 8 * 8
    lines = read_lines(tmp_path / "metrics.jsonl")
    trained = Counter(line["step"] for line in lines if "trainer/loss" in line)
    assert trained == dict.fromkeys(range(1, NUM_STEPS + 1), 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["staleness_max"] <= 1) == (NUM_STEPS, True)
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
def test_the_next_session_has_the_replicas_that_the_run_was_scaled_to(tmp_path: Path) -> None:
    command = train(
        tmp_path,
        f"num_steps={3 * NUM_STEPS}",
        "checkpoint.every_steps=2",
        "checkpoint.export=false",
    )
    wait_for_step(command, tmp_path, 2)
    ask(str(tmp_path), {"ask": "scale", "generators": 3, "drains": True})
    wait_for_step(command, tmp_path, 12)

    def all_serve() -> bool:
        rows = ask(str(tmp_path), {"ask": "status"})["executors"]
        states = [row["state"] for row in rows if row["executor"].startswith("generator-")]
        return states == ["serving"] * 3

    wait_until(command, "three generators that serve", all_serve)
    generators = executors(command, r"generator-\d")
    assert len(generators) == 3
    os.kill(executors(command, "trainer")[0], signal.SIGKILL)
    wait_for_step(command, tmp_path, 3 * NUM_STEPS)
    assert executors(command, r"generator-\d") == generators
    code, out, err = finish(command)
    assert code == 0, err + out
    assert command.wait_until_gone(5.0) == []


@pytest.mark.long
@searched(few=1, many=12)
def test_a_run_of_which_processes_are_killed_and_stopped_ends_as_if_they_were_not(
    seeds: list[int], tmp_path: Path
) -> None:
    """The short form of `make chaos`: one leg, other victims and moments every day."""
    for seed in seeds:
        rng = random.Random(seed)
        others = ["start", "publish", "save", "evaluation", "end"]  # some pass too fast to be met
        moments = ["step", rng.choice(others)]
        chaos = Chaos(tmp_path / str(seed), SMALL_RUN, rng, num_prompts=16, per_step=64)
        with case(seed):
            chaos.run_leg(moments)
        assert chaos.num_faults > 0
