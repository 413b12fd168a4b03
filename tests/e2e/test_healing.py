"""A replica, a scorer and a collector that are killed while the run goes on; real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from llamarl.run.control import SOCKET, ask
from tests.e2e.commands import (
    executors,
    finish,
    read_archive,
    train,
    wait_for_other,
    wait_for_restart,
    wait_for_step,
)
from tests.json_lines import read_lines


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
    assert not (tmp_path / SOCKET).parent.exists()
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
