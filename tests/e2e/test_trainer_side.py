"""The trainer's side of a run that is lost, and started again while the generators live."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from llamarl.controller.control import ask
from tests.e2e.commands import (
    executors,
    finish,
    read_archive,
    train,
    wait_for_other,
    wait_for_step,
)
from tests.json_lines import read_lines

pytestmark = pytest.mark.slow
NUM_STEPS = 12


@pytest.mark.parametrize(
    ("role", "number", "settings"),
    [
        ("trainer", signal.SIGKILL, ["generator.num_replicas=2", "generator.max_num_seqs=16"]),
        ("trainer", signal.SIGSTOP, ["trainer.num_ranks=2", "weights=collective"]),
        ("storage-1", signal.SIGKILL, ["experience.units_per_host=2", "generator.num_ranks=2"]),
        ("trainer", signal.SIGKILL, ["placement=colocated", "weights.staging=host"]),
        ("generator-0", signal.SIGKILL, ["placement=colocated", "generator.num_replicas=2"]),
        ("generator-0", signal.SIGKILL, ["placement=colocated"]),
    ],
)
def test_what_is_lost_beside_the_generators_is_started_again(
    role: str, number: signal.Signals, settings: list[str], tmp_path: Path
) -> None:
    command = train(
        tmp_path,
        f"num_steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        "cluster.liveness_timeout_s=10",
        *settings,
    )
    wait_for_step(command, tmp_path, 5, 240.0)
    generators = executors(command, r"generator-\d")
    assert generators
    victim = executors(command, role)[-1]
    os.kill(victim, number)
    wait_for_step(command, tmp_path, NUM_STEPS, 240.0)
    now = executors(command, r"generator-\d")
    assert len(now) == len(generators)
    assert {*generators} - {victim} <= {*now}
    code, out, err = finish(command, 240.0)
    assert code == 0, err + out
    assert "Traceback" not in err
    assert "the run goes on from step-000000" in " ".join(out.split())
    rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == NUM_STEPS * 8 * 8
    lines = read_lines(tmp_path / "metrics.jsonl")
    trained = Counter(line["step"] for line in lines if "trainer/loss" in line)
    assert trained == dict.fromkeys(range(1, NUM_STEPS + 1), 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["staleness_max"] <= 1) == (NUM_STEPS, True)
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert command.wait_until_gone(5.0) == []


@pytest.mark.parametrize(("role", "after_s"), [("trainer", 0.0), ("trainer", 2.5), ("scorer", 1.0)])
def test_a_loss_while_the_trainers_side_starts_again_is_one_more_restart(
    role: str, after_s: float, tmp_path: Path
) -> None:
    command = train(tmp_path, f"num_steps={NUM_STEPS}", "checkpoint.every_steps=2")
    wait_for_step(command, tmp_path, 5, 240.0)
    generators, before = executors(command, "generator-0"), executors(command, role)
    os.kill(executors(command, "trainer")[0], signal.SIGKILL)
    for pid in wait_for_other(command, role, before):
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    wait_for_step(command, tmp_path, NUM_STEPS, 240.0)
    assert executors(command, "generator-0") == generators
    code, out, err = finish(command, 240.0)
    assert code == 0, err + out
    assert "Traceback" not in err
    if role == "trainer":
        assert " ".join(out.split()).count("the run goes on from step-") == 2
    rows = [row for row in read_archive(tmp_path) if row["outcome"] == "trained"]
    assert len(rows) == len({row["row_id"] for row in rows}) == NUM_STEPS * 8 * 8
    assert command.wait_until_gone(5.0) == []


def test_the_next_session_has_the_replicas_that_the_run_was_scaled_to(tmp_path: Path) -> None:
    command = train(
        tmp_path,
        f"num_steps={3 * NUM_STEPS}",
        "checkpoint.every_steps=2",
        "checkpoint.export=false",
    )
    wait_for_step(command, tmp_path, 2, 240.0)
    ask(str(tmp_path), {"ask": "scale", "generators": 3, "drains": True})
    wait_for_step(command, tmp_path, 12, 240.0)
    generators = executors(command, r"generator-\d")
    assert len(generators) == 3
    os.kill(executors(command, "trainer")[0], signal.SIGKILL)
    wait_for_step(command, tmp_path, 3 * NUM_STEPS, 240.0)
    assert executors(command, r"generator-\d") == generators
    code, out, err = finish(command, 240.0)
    assert code == 0, err + out
    assert command.wait_until_gone(5.0) == []
