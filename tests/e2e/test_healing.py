"""A replica that is killed while the run goes on; real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from llamarl.control import ask
from tests.e2e.commands import Command, executors, finish, read_archive, train, wait_for_step


def wait_for_replica(command: Command, run_dir: Path, name: str, num_restarts: int) -> None:
    """Until it serves after so many restarts."""
    end_s = time.monotonic() + 90.0
    while time.monotonic() < end_s:
        assert command.process.poll() is None, command.process.communicate()
        rows = ask(str(run_dir), {"ask": "status"})["executors"]
        (row,) = (row for row in rows if row["executor"] == name)
        if (row["state"], row["restarts"]) == ("serving", num_restarts):
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} does not serve again: {row}")


def test_a_killed_replica_is_started_again_in_the_same_run_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """The only one, so that all further rollouts come from the one that takes its place."""
    num_steps = 100
    command = train(tmp_path, f"num_steps={num_steps}", "checkpoint.export=false")
    wait_for_step(command, tmp_path, 2)
    (victim,) = executors(command, "generator-0")
    os.kill(victim, signal.SIGKILL)
    wait_for_replica(command, tmp_path, "generator-0", 1)
    (other,) = executors(command, "generator-0")
    assert other != victim
    version = ask(str(tmp_path), {"ask": "status"})["version"]
    wait_for_step(command, tmp_path, version + 2)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = finish(command)
    assert code == 75, err
    assert command.wait_until_gone(5.0) == []
    assert not (tmp_path / ".control").exists()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    rows = [row["row_id"] for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len(set(rows)) == max(steps) * 8 * 8
