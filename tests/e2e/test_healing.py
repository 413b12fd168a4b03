"""A process of every kind is killed while the run goes on, amid slow tools; real processes, token
by token. Other moments, and several losses at once: test_chaos.py, test_lost_executors.py."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from llamarl.controller.control import SOCKET, ask
from tests.e2e.commands import (
    Command,
    executors,
    finish,
    read_archive,
    read_rollouts,
    saved_words,
    start,
    train,
    wait_for_other,
    wait_for_restart,
    wait_for_step,
)
from tests.e2e.test_tools_exact import SMALL, check
from tests.e2e.test_tools_healing import kill_amid_a_call, slow_recipe, victims
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE

ALONE = "generator-0", "environment-0", "scorer", "reference", "collector-0"
SESSION = "trainer", "storage-0"  # with these, all but the generators
OPTIONS = [
    *(each for each in SMALL if not each.startswith(("cluster", "num_steps"))),
    *("num_steps=100000", "environment.num_workers=2", "generator.num_collectors=1"),
    *("algorithm.kl_coefficient=0.01", "checkpoint.every_steps=1", "cluster.max_restarts=100"),
]


@pytest.mark.long
def test_what_is_killed_amid_slow_tools_is_started_again_and_no_rollout_is_lost_or_wrong(
    tmp_path: Path,
) -> None:
    """The only replica, so that nothing goes on without the one in its place."""
    run_dir = tmp_path / "run"
    recipe = f"--config-dir={slow_recipe(tmp_path)}"
    command = start("train", recipe, f"run_dir={run_dir}", *OPTIONS)
    wait_for_step(command, run_dir, 2)
    (worker,) = victims(command, "a process of the environment")
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
    assert err.splitlines()[-3:-1] == saved_words("interrupted", run_dir)
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
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_frozen_model_that_is_lost_is_started_again_alone(
    tmp_path: Path, sent: signal.Signals
) -> None:
    options = ["algorithm.kl_coefficient=0.01", "num_steps=200", "checkpoint.export=false"]
    command = train(tmp_path, *options)
    wait_for_step(command, tmp_path, 2)
    others = {name: executors(command, name) for name in ("trainer", "generator-0", "scorer")}
    (victim,) = executors(command, "reference")
    os.kill(victim, sent)
    wait_for_restart(command, tmp_path, "reference")
    version = ask(str(tmp_path), {"ask": "status"})["version"]
    wait_for_step(command, tmp_path, version + 2)
    assert {name: executors(command, name) for name in others} == others
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command)
    assert code == 75, err
    assert command.wait_until_gone(5.0) == []
    rows = [row["row_id"] for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len(set(rows))


@pytest.mark.long
def test_a_collector_that_is_killed_at_random_moments_costs_no_rollout(tmp_path: Path) -> None:
    rng = random.Random(0)
    options = ["generator.num_collectors=1", "generator.num_replicas=2", "cluster.max_restarts=100"]
    command = train(tmp_path, *options, "num_steps=200", "checkpoint.export=false")
    wait_for_step(command, tmp_path, 2)
    others = {name: executors(command, name) for name in ("trainer", r"generator-\d", "scorer")}
    victims = executors(command, "collector-0")
    for _ in range(6):
        os.kill(victims[-1], signal.SIGKILL)
        victims += wait_for_other(command, "collector-0", victims)
        time.sleep(rng.uniform(0.0, 3.0))  # while it starts, or asks
    version = ask(str(tmp_path), {"ask": "status"})["version"]
    wait_for_step(command, tmp_path, version + 3)
    assert {name: executors(command, name) for name in others} == others
    command.process.send_signal(signal.SIGTERM)
    code, out, err = finish(command)
    assert code == 75, err
    assert "the run goes on from" not in out
    assert command.wait_until_gone(5.0) == []
    steps = read_lines(tmp_path / "metrics.jsonl")
    last = max(line["step"] for line in steps)
    rows = read_archive(tmp_path)
    outcomes = Counter(row["row_id"] for row in rows)
    assert set(outcomes.values()) == {1}
    assert sum(row["outcome"] == "trained" for row in rows) == last * 8 * 8
    assert "lost" not in {row["outcome"] for row in rows}, "none was written twice"
