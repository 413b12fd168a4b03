"""Processes are killed while episodes wait for a slow tool; real processes, token by token."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import (
    Command,
    executors,
    finish,
    read_rollouts,
    reward_workers,
    start,
    told_of,
    wait_for_restart,
    wait_for_step,
)
from tests.e2e.test_tools_exact import SMALL, check
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE

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


def victims(command: Command, role: str) -> list[int]:
    if role == "a process of the environment":
        workers = reward_workers(command.family())
        return [pid for pid in workers if "environment" in told_of(pid, "cmdline")][:1]
    return executors(command, role)


@pytest.mark.long
@pytest.mark.parametrize("role", ["generator-0", "environment-0", "a process of the environment"])
def test_what_is_killed_amid_slow_tools_costs_its_episodes_and_no_token_is_wrong(
    tmp_path: Path, role: str
) -> None:
    small = [each for each in SMALL if not each.startswith(("cluster", "num_steps"))]
    command = start(
        "train",
        f"--config-dir={slow_recipe(tmp_path)}",
        f"run_dir={tmp_path / 'run'}",
        *small,
        "num_steps=100000",
        "generator.num_replicas=2",
        "environment.num_workers=2",
    )
    run_dir = tmp_path / "run"
    wait_for_step(command, run_dir, 2)
    (victim,) = victims(command, role)
    kill_amid_a_call(victim, tmp_path)
    is_executor = role in ("generator-0", "environment-0")
    if is_executor:
        wait_for_restart(command, run_dir, role)
    step = len(read_lines(run_dir / "metrics.jsonl"))
    wait_for_step(command, run_dir, step + 3)
    time.sleep(0.1)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command)
    assert code == 75, err
    assert command.wait_until_gone(5.0) == []
    rows = dict(enumerate(read_lines(TOOLS_RECIPE / "prompts.jsonl"), start=1))
    trained = [line for line in read_rollouts(run_dir) if line["outcome"] == "trained"]
    assert len({line["row_id"] for line in trained}) == len(trained)
    assert max(len(check(line, rows)) // 2 + 1 for line in trained) >= 3
    restarts = sum(
        line.get("episode/restarts", 0) for line in read_lines(run_dir / "metrics.jsonl")
    )
    # A plain tool has no state: its call is repeated, unless it was alone, and may be the cause.
    assert restarts > 0 if is_executor else restarts <= 1
