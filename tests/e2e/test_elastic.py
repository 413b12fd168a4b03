"""A run whose rollouts become longer adds a replica by itself; real processes."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llamarl.controller.control import ask
from tests.e2e.commands import RECIPE, SMALL, finish, start

SHORT, LONG = 4, 64  # tokens: they double four times
NUM_SHORT_STEPS, NUM_STEPS = 12, 60
PER_STEP = 64  # rollouts
TASK = '''"""Rewards drawn from the text: half of them 1, so that every rollout is trained."""

import zlib


def reward(prompt, completion):
    return float(zlib.crc32(completion.encode()) & 1)
'''


def write_recipe(folder: Path) -> None:
    """The quickstart with lengths that double four times, which rewards do not depend on."""
    folder.mkdir()
    for name in ("checkpoint", "prompts.jsonl"):
        (folder / name).symlink_to(RECIPE / name)
    steps = [SHORT] * NUM_SHORT_STEPS + [LONG] * NUM_STEPS
    (folder / "lengths.json").write_text(json.dumps([n for n in steps for _ in range(PER_STEP)]))
    (folder / "task.py").write_text(TASK)
    text = (RECIPE / "run.yaml").read_text()
    (folder / "base.yaml").write_text(text.replace("{override /algorithm: aipo}, _self_", "_self_"))
    (folder / "run.yaml").write_text(
        "defaults: [base, _self_]\n"
        "data: {held_out: null}\n"
        "reward: {functions: [task]}\n"
        "sampling: {replay_lengths: lengths.json}\n"
    )


@pytest.mark.slow
def test_a_run_whose_rollouts_become_longer_adds_a_replica(tmp_path: Path) -> None:
    """With two slots and short rollouts training takes more than half as long as generation, so
    that a second replica would not pay; with long ones it takes a third."""
    recipe, run_dir = tmp_path / "recipe", tmp_path / "run"
    write_recipe(recipe)
    command = start(
        "train",
        f"--config-dir={recipe}",
        f"run_dir={run_dir}",
        *SMALL,
        f"num_steps={NUM_STEPS}",
        "generator.elastic=[1,2]",
        "generator.max_num_seqs=2",
        "checkpoint.export=false",
    )
    added_at = None
    while command.process.poll() is None and added_at is None:
        with suppress(ValueError):  # it does not listen yet, or not any more
            status = ask(str(run_dir), {"ask": "status"})
            if sum(row["executor"].startswith("generator-") for row in status["executors"]) == 2:
                added_at = status["version"]
        time.sleep(0.2)
    command.process.terminate()
    _, out, err = finish(command)
    assert added_at is not None, err
    assert added_at >= NUM_SHORT_STEPS, err
    assert "generators: 1 -> 2, for a step takes" in " ".join(out.split())
    assert command.wait_until_gone(5.0) == []
