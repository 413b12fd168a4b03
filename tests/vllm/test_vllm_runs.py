"""Whole runs of the shipped recipe with vLLM, started as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import Command, executors, finish, train
from tests.e2e.test_quickstart import quickstart

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_S = 300.0  # vLLM's import, in every rank, on busy cores
GIVEN_UP_S = 60.0


def test_the_quickstart_learns_with_vllm(tmp_path: Path) -> None:
    summary = quickstart(tmp_path, "generator=vllm")
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.93
    assert summary["staleness_max"] <= 1
    assert summary["tokens_during_publish"] > 0


def kill_a_rank(command: Command, run_dir: Path) -> float:
    """Kill the second rank of generator 0 once two steps are done; when that was."""
    end_s = time.monotonic() + START_S
    while '"step": 2,' not in read(run_dir / "metrics.jsonl"):
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.1)
    ranks = executors(command, "generator-0")
    log = run_dir / "logs" / "generator-0-1.log"
    second = [pid for pid in ranks if os.path.samefile(f"/proc/{pid}/fd/1", log)]
    os.kill(min(second), signal.SIGKILL)  # the others are its children
    return time.monotonic()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_run_goes_on_without_a_replica_that_lost_a_rank(tmp_path: Path) -> None:
    command = train(
        tmp_path, "num_steps=30", "generator=vllm", "generator.num_ranks=2",
        "generator.num_replicas=2",
    )  # fmt: skip
    killed_s = kill_a_rank(command, tmp_path)
    while executors(command, "generator-0"):  # the rank that is left may wait for the dead one
        assert time.monotonic() < killed_s + GIVEN_UP_S
        time.sleep(0.1)
    code, out, err = finish(command, START_S)
    assert code == 0, err + out
    assert "lost" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 30
    assert command.wait_until_gone(5.0) == []


def test_a_run_ends_with_the_name_of_its_only_replica(tmp_path: Path) -> None:
    command = train(tmp_path, "num_steps=400", "generator=vllm", "generator.num_ranks=2")
    kill_a_rank(command, tmp_path)
    code, _, err = finish(command, GIVEN_UP_S)
    assert code == 1
    assert "lost executor generator-0" in err
    assert command.wait_until_gone(5.0) == []
