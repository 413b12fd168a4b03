"""A replica and a scorer that are killed while the run goes on; real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from llamarl.control import ask
from tests.e2e.commands import (
    executors,
    finish,
    read_archive,
    train,
    wait_for_restart,
    wait_for_step,
)


def test_what_is_killed_is_started_again_alone_in_the_same_run_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """The only replica and the scorer, so that nothing goes on without those in their place."""
    num_steps = 100
    command = train(tmp_path, f"num_steps={num_steps}", "checkpoint.export=false")
    wait_for_step(command, tmp_path, 2)
    (trainer,) = executors(command, "trainer")
    for name in ("scorer", "generator-0"):
        (victim,) = executors(command, name)
        os.kill(victim, signal.SIGKILL)
        wait_for_restart(command, tmp_path, name)
        (other,) = executors(command, name)
        assert other != victim
        version = ask(str(tmp_path), {"ask": "status"})["version"]
        wait_for_step(command, tmp_path, version + 2)
    assert executors(command, "trainer") == [trainer]
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command)
    assert code == 75, err
    assert command.wait_until_gone(5.0) == []
    assert not (tmp_path / ".control").exists()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    rows = [row["row_id"] for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len(set(rows)) == max(steps) * 8 * 8


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
