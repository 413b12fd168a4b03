"""`llamarl check` with real processes on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.cli.test_rehearsal import write_environment_recipe
from tests.e2e.commands import Command, executors, finish
from tests.places import RECIPE

TWO_RANKS = ["trainer.num_ranks=2", "weights=collective", "generator.num_ranks=2"]
IMPATIENT = (
    "import sys; from llamarl.cli import check_trial; check_trial.CALL_S = 5.0; "
    "from llamarl.cli.main import program; program()"
)


def start_check(run_dir: Path, *overrides: str, recipe: Path = RECIPE) -> Command:
    mark = f"LLAMARL_TEST_{uuid.uuid4().hex}"
    arguments = ["check", f"--config-dir={recipe}", f"run_dir={run_dir}/run", *overrides]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    return Command(process, mark)


@pytest.mark.long
def test_all_passes_on_cpus_and_nothing_is_left(tmp_path: Path) -> None:
    command = start_check(tmp_path, *TWO_RANKS)
    code, out, err = finish(command)
    assert code == 0, out + err
    lines = out.splitlines()
    assert len(lines) == 11
    assert all(line.startswith("ok ") for line in lines), out
    assert "4 ranks met" in out
    assert not command.wait_until_gone(5.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_recipe_with_environments_and_a_best_version_passes(tmp_path: Path) -> None:
    recipe = write_environment_recipe(tmp_path / "recipe")
    best = ["checkpoint.best=reward", "evaluation.patience=3", "data.prompt_field=prompt"]
    code, out, err = finish(start_check(tmp_path, *best, "cluster=inline", recipe=recipe))
    assert code == 0, out + err
    assert "skipped episodes" in out


@pytest.mark.long
def test_a_rank_that_stands_still_is_found_at_the_step(tmp_path: Path) -> None:
    """Its group's collective would hang for minutes."""
    command = start_check(tmp_path, *TWO_RANKS)
    assert command.process.stdout is not None
    for line in command.process.stdout:
        if "publish  " in line:  # before the step, whose groups the ranks have formed
            os.kill(executors(command, "trainer")[-1], signal.SIGSTOP)
            break
    start_s = time.monotonic()
    code, out, err = finish(command)
    assert code == 2
    assert "did not end within 5 s: a rank waits for another one" in out
    assert "all checks must pass, got" in err
    assert time.monotonic() - start_s < 60
    assert not command.wait_until_gone(5.0)
    assert not list(tmp_path.iterdir())
