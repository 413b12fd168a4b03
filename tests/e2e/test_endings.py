"""A signal at every kind of moment of a run: each ends in a right result or in a clear line."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.core import checkpoint
from tests.e2e.commands import (
    KEEPING,
    Command,
    executors,
    finish,
    has_step,
    read_archive,
    train,
    wait_for_step,
    wait_until,
)
from tests.json_lines import read_lines

NUM_STEPS = 4
MOMENTS: dict[str, Callable[[Command, Path], bool]] = {
    "the start": lambda command, run_dir: len(command.family()) >= 4,
    "a step": lambda command, run_dir: has_step(run_dir, 1),
    "a save": lambda command, run_dir: any(run_dir.glob("checkpoints/unfinished-*")),
    "the last step": lambda command, run_dir: has_step(run_dir, NUM_STEPS - 1),
    "the export": lambda command, run_dir: version_saved(run_dir) == NUM_STEPS,
    "the shutdown": lambda command, run_dir: (run_dir / "export").is_dir(),
}


def version_saved(run_dir: Path) -> int | None:
    saved = checkpoint.latest(run_dir)
    return None if saved is None else checkpoint.version_of(saved)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_a_run_is_ended_it_says_what_is_saved_and_goes_on_to_the_same_end(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    command = train(tmp_path, *KEEPING, f"num_steps={NUM_STEPS}")
    wait_until(command, moment, lambda: MOMENTS[moment](command, tmp_path))
    command.process.send_signal(number)
    code, out, err = finish(command)
    assert command.wait_until_gone(5.0) == []
    codes = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -9}
    is_late = moment in ("the last step", "the export", "the shutdown")
    assert code == codes[number] or (is_late and code == 0), err + out
    assert "Traceback" not in err
    saved = checkpoint.latest(tmp_path)
    if code in (75, 130):
        assert err.splitlines()[0] == f"llamarl: {'terminated' if code == 75 else 'interrupted'}"
        words = "no version is saved" if saved is None else f"is saved in {saved}\n"
        assert words in err
        if moment != "the start":
            assert saved is not None
    again = train(tmp_path, *KEEPING, f"num_steps={NUM_STEPS}", "checkpoint.resume=auto")
    code, out, err = finish(again)
    assert code == 0, err + out
    assert again.wait_until_gone(5.0) == []
    lines = read_lines(tmp_path / "metrics.jsonl")
    steps = [line["step"] for line in lines if "reward/mean" in line]
    assert steps == list(range(1, NUM_STEPS + 1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollouts_trained"] == NUM_STEPS * 8 * 8
    ids = [line["row_id"] for line in read_archive(tmp_path)]
    assert len(ids) == len(set(ids))
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    command = train(tmp_path, *KEEPING, "num_steps=400")
    wait_for_step(command, tmp_path, 1)
    command.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    command.process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    code, _, err = finish(command)
    assert code == 130
    assert "Traceback" not in err
    assert command.wait_until_gone(5.0) == []
    assert time.monotonic() - start_s < 30


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "scorer", "storage-0", "generator-0"])
def test_a_dead_executor_ends_the_run_with_its_name(role: str, tmp_path: Path) -> None:
    never = ["cluster.max_restarts=0", "generator.max_restarts=0"]
    command = train(tmp_path, "num_steps=400", *never)
    wait_for_step(command, tmp_path, 2)
    os.kill(executors(command, role)[0], signal.SIGKILL)
    code, _, err = finish(command)
    assert code == 1
    assert f"lost executor {role}" in err
    assert "ExceptionGroup" not in err
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize(
    "num_processes", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4, 6))]
)
def test_a_run_killed_during_its_start_leaves_no_process_and_can_be_repeated_at_once(
    num_processes: int, tmp_path: Path
) -> None:
    command = train(tmp_path, "num_steps=2")
    config = tmp_path / "config.yaml"
    has_begun = lambda: config.exists() and len(command.family()) >= num_processes  # noqa: E731
    wait_until(command, "its start", has_begun)
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    again = train(tmp_path, "num_steps=2", "checkpoint.resume=auto") if num_processes > 2 else None
    assert command.wait_until_gone(5.0) == []
    if again is not None:
        code, out, err = finish(again)
        assert code == 0, err + out
        ids = [line["row_id"] for line in read_archive(tmp_path)]
        assert len(ids) == len(set(ids))
