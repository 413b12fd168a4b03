"""Executors that die, or fall silent and wake up, at moments of all kinds; real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import (
    Command,
    executors,
    finish,
    read_archive,
    train,
    wait_for_save,
    wait_for_step,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(6))
def test_a_replica_that_wakes_when_it_was_given_up_harms_nothing(seed: int, tmp_path: Path) -> None:
    """It stands still at a random moment and wakes about when it is found to be silent. On-policy,
    so that the rollouts it held are what the whole run waits for."""
    rng, num_steps = random.Random(seed), 10
    command = train(
        tmp_path,
        f"num_steps={num_steps}",
        "generator.num_replicas=2",
        "generator.max_num_seqs=16",
        "staleness.max_staleness=0",
        "cluster.liveness_timeout_s=4",
        f"experience.units_per_host={1 + seed % 2}",
    )
    wait_for_step(command, tmp_path, 1)
    time.sleep(rng.uniform(0.0, 1.5))
    (victim,) = executors(command, f"generator-{rng.randrange(2)}")
    os.kill(victim, signal.SIGSTOP)
    time.sleep(rng.choice([rng.uniform(1.0, 3.0), rng.uniform(3.5, 4.5), rng.uniform(4.5, 6.0)]))
    with contextlib.suppress(ProcessLookupError):  # it was given up, and its process ended
        os.kill(victim, signal.SIGCONT)
    code, out, err = finish(command)
    assert code == 0, err + out
    rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == num_steps * 8 * 8
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["staleness_max"]) == (num_steps, 0)
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["generator-0", "scorer", "storage-0"])
def test_a_run_that_has_made_its_last_step_keeps_it_whichever_executor_is_lost_then(
    role: str, number: signal.Signals, tmp_path: Path
) -> None:
    num_steps = 4
    command = train(tmp_path, f"num_steps={num_steps}", "cluster.liveness_timeout_s=4")
    wait_for_step(command, tmp_path, num_steps)
    hit(command, role, number)
    code, out, err = finish(command)
    assert code == 0, err + out
    assert (tmp_path / "checkpoints" / f"step-{num_steps:08d}" / "controller.json").is_file()
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == num_steps
    assert "Traceback" not in err
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("moment", ["start", "save", "last step", "shutdown"])
def test_a_generator_killed_at_any_moment_leaves_a_right_result_or_one_clear_line(
    moment: str, num_replicas: int, tmp_path: Path
) -> None:
    num_steps = 6
    command = train(
        tmp_path,
        f"num_steps={num_steps}",
        f"generator.num_replicas={num_replicas}",
        "checkpoint.every_steps=2",
    )
    if moment == "start":
        end_s = time.monotonic() + 60.0
        while not executors(command, "generator-0"):
            assert time.monotonic() < end_s
            time.sleep(0.01)
    elif moment == "save":
        wait_for_save(command, tmp_path, 2)
    elif moment == "last step":
        wait_for_step(command, tmp_path, num_steps - 1)
    else:
        while not (tmp_path / "export").exists():
            assert command.process.poll() is None
            time.sleep(0.01)
    hit(command, "generator-0", signal.SIGKILL)
    code, _, err = finish(command)
    if code == 0:
        rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
        assert len(rows) == len({row["row_id"] for row in rows}) == num_steps * 8 * 8
        assert (tmp_path / "export" / "model.safetensors").is_file()
    else:
        assert moment in ("start", "save", "last step"), err
        assert num_replicas == 1 or moment == "start", err
        assert code == 1
        assert "lost executor generator-0" in err, err
        assert "ExceptionGroup" not in err
    assert command.wait_until_gone(5.0) == []


def hit(command: Command, role: str, number: signal.Signals) -> None:
    for pid in executors(command, role):
        os.kill(pid, number)
