"""Runs that end early, at the start or in the middle: what is left, and how they go on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import (
    KEEPING,
    end,
    executors,
    finish,
    goes_on,
    last_due,
    newest_state,
    read_archive,
    saved_words,
    train,
    wait_for_save,
    wait_for_step,
)


@pytest.mark.slow
def test_a_run_without_its_trainer_ends_with_its_name_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-c, then the death of the resumed run's trainer in the midst of the second save."""
    command = train(tmp_path, *KEEPING, "num_steps=400")
    wait_for_step(command, tmp_path, 3)
    command.process.send_signal(signal.SIGINT)
    first = end(command, [], tmp_path).state
    ending = ["checkpoint.resume=auto", "cluster.max_restarts=0"]
    command = train(tmp_path, *KEEPING, "num_steps=400", *ending)
    wait_for_step(command, tmp_path, last_due(first) + 2)
    (trainer,) = executors(command, "trainer")
    wait_for_save(command, tmp_path, last_due(first) + 4)
    os.kill(trainer, signal.SIGKILL)
    without_trainer = end(command, [trainer], tmp_path)
    assert without_trainer.code == 1
    assert "lost executor trainer" in without_trainer.err
    version = without_trainer.state["version"]
    assert f"llamarl: version {version} is saved in " in without_trainer.err
    assert without_trainer.err.endswith(f"run_dir={tmp_path} checkpoint.resume=auto\n")
    assert re.search(r"version \d+ could not be saved: lost", " ".join(without_trainer.out.split()))
    assert "ExceptionGroup" not in without_trainer.err
    assert without_trainer.left == []
    num_steps = f"num_steps={version + 2}"
    code, out, err = finish(train(tmp_path, *KEEPING, num_steps, "checkpoint.resume=auto"))
    assert code == 0, err + out
    goes_on(tmp_path, first, without_trainer.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["ctrl-c", "killed"]
)
def test_ended_runs_leave_no_process_and_go_on_where_they_were(
    number: int, code: int, tmp_path: Path
) -> None:
    """A signal in the midst of a run, then kill -9 of the resumed run in the midst of a save."""
    command = train(tmp_path, *KEEPING, "num_steps=400")
    wait_for_step(command, tmp_path, 3)
    assert len(command.family()) >= 6  # controller, 4 executors, a reward worker
    command.process.send_signal(number)
    got, _, err = finish(command, 30.0)
    assert got == code
    assert len(err.splitlines()) == (3 if number == signal.SIGINT else 0), err
    assert command.wait_until_gone(10.0) == []
    first = newest_state(tmp_path)
    command = train(tmp_path, *KEEPING, "num_steps=400", "checkpoint.resume=auto")
    wait_for_save(command, tmp_path, last_due(first) + 4)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    assert command.wait_until_gone(10.0) == []
    second = newest_state(tmp_path)
    num_steps = second["version"] + 2
    command = train(tmp_path, *KEEPING, f"num_steps={num_steps}", "checkpoint.resume=auto")
    code, out, err = finish(command)
    assert code == 0, err + out
    goes_on(tmp_path, first, second)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollouts_trained"] == num_steps * 8 * 8


@pytest.mark.slow
def test_sigterm_ends_everything(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    wait_for_step(command, tmp_path, 2)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command, 30.0)
    assert code == 75
    assert err.splitlines()[:-1] == saved_words("terminated", tmp_path)
    assert command.wait_until_gone(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 1.0, 2.0, 3.0])
def test_a_signal_during_the_start_ends_everything(delay_s: float, tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400")
    end_s = time.monotonic() + 60
    while not (tmp_path / "config.yaml").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(delay_s)
    command.process.send_signal(signal.SIGINT)
    code, _, err = finish(command, 30.0)
    assert code == 130
    assert err == f"llamarl: interrupted\nllamarl: no version is saved in {tmp_path}\n"
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize(
    "num_processes", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4, 6))]
)
def test_a_run_killed_during_its_start_leaves_no_process_and_can_be_repeated_at_once(
    num_processes: int, tmp_path: Path
) -> None:
    command = train(tmp_path, "num_steps=2")
    end_s = time.monotonic() + 60
    while not (tmp_path / "config.yaml").exists() or len(command.family()) < num_processes:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    again = train(tmp_path, "num_steps=2", "checkpoint.resume=auto") if num_processes > 2 else None
    assert command.wait_until_gone(5.0) == []
    if again is not None:
        code, out, err = finish(again)
        assert code == 0, err + out
        ids = [line["row_id"] for line in read_archive(tmp_path)]
        assert len(ids) == len(set(ids))
