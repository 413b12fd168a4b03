"""A replica and a scorer that are killed while the run goes on; real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from llamarl.control import ask
from tests.e2e.commands import Command, executors, finish, read_archive, train, wait_for_step


def wait_for_restart(command: Command, run_dir: Path, name: str) -> None:
    """Until it works again after one restart."""
    end_s = time.monotonic() + 90.0
    while time.monotonic() < end_s:
        assert command.process.poll() is None, command.process.communicate()
        rows = ask(str(run_dir), {"ask": "status"})["executors"]
        (row,) = (row for row in rows if row["executor"] == name)
        if row["state"] in ("serving", "running") and row["restarts"] == 1:
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} does not work again: {row}")


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
