"""Tries cases in forks of a process that has done the imports.

A case's process group is gone when its outcome is known.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from fuzzing.cases import SETTINGS, Case

LIMIT_S = 60
LIMIT_BYTES = 2 * 10**9  # more than the imports hold
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
TASK = "def reward(prompt, completion):\n    return float(len(completion) % 3)\n"
# What a run may end with, traceback and all: the user's reward code, or a policy driven to madness.
ALLOWED = ("reward.max_failure_rate", "no trainable group", "check trainer.lr", "is not finite")


@dataclass(frozen=True)
class CallResult:
    """How one case ended. `finding` says what is wrong with that, "" if nothing is."""

    case: Case
    verdict: str
    finding: str
    seconds: float
    output: str


def make_inputs(folder: Path) -> None:
    """The sound inputs in `folder`: a recipe, a run of two steps that can go on, and an export.

    Made in a fork: this process must keep to one thread, or its forks would lack the others.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _make_inputs(folder)
            code = 0
        except BaseException:  # noqa: BLE001 - shown, and the process ends
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("the sound inputs could not be made")


def _make_inputs(folder: Path) -> None:
    import pyarrow
    import torch
    from pyarrow import parquet
    from safetensors.torch import load_file

    from llamarl.model import hf

    recipe = folder / "recipe"
    shutil.copytree(RECIPE, recipe)
    for name, count in {"prompts.jsonl": 40, "held_out.jsonl": 8}.items():
        lines = (recipe / name).read_text().splitlines(keepends=True)[:count]
        (recipe / name).write_text("".join(lines))
    rows = [{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), recipe / "prompts.parquet")
    (recipe / "task.py").write_text(TASK)
    (recipe / "lengths.json").write_text("[4, 9, 16]")
    checkpoint = recipe / "checkpoint"
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2]}')
    weights = load_file(checkpoint / "model.safetensors")
    for name, size in {"recipe/sharded": 10**6, "export": 10**9}.items():
        hf.save(
            folder / name,
            weights.items(),
            source_folder=checkpoint,
            dtype=torch.float32,
            max_shard_bytes=size,
        )
    next((recipe / "sharded").glob("llamarl-manifest*")).unlink()  # as from Hugging Face
    case = Case(0, "sound", ["num_steps=2", f"run_dir={folder}/run"], is_run=True, composes=True)
    code, output, _ = _wait(*start(case, folder, None), LIMIT_S)
    assert code == 0, output


def copy_inputs(sound: Path, folder: Path) -> None:
    """A copy for one case; what no run writes to in place is linked."""

    def copy(source: str, target: str) -> None:
        is_linked = "/checkpoint" in source or "/export/" in source or "/sharded/" in source
        (os.link if is_linked else shutil.copyfile)(source, target)

    shutil.copytree(sound, folder, copy_function=copy)


def outcome(case: Case, started: tuple[int, Path]) -> CallResult:
    """Wait for the process and judge how it ended."""
    begin = time.monotonic()
    code, output, num_bytes = _wait(*started, LIMIT_S)
    seconds = time.monotonic() - begin
    return CallResult(case, *_judge(case, code, output, num_bytes), seconds, output)


def _judge(case: Case, code: int | None, output: str, num_bytes: int) -> tuple[str, str]:
    lines = [line for line in output.splitlines() if line.strip()]
    squeezed = "".join(output.split())  # rich wraps lines anywhere
    if code is None:
        return "hung", f"not done after {LIMIT_S} s"
    if num_bytes > LIMIT_BYTES:
        return "large", f"took {num_bytes / 1e9:.1f} GB"
    if code == 0:
        passed_over = "resumingfrom" in squeezed
        if case.must_fail and not passed_over:
            return "accepted", "damage was accepted in silence"
        return ("passed over" if passed_over else "accepted"), ""
    errors = [line for line in lines if line.startswith("llamarl: ")]
    if code == 2 and len(errors) == 1 and "Traceback" not in output:
        return "refused", "" if lines[-1] == errors[0] else "more than one line"
    if case.is_run and code == 1 and any(words in output for words in ALLOWED):
        return "ended", ""
    return "failed", f"exit {code}: {lines[-1][:200] if lines else 'no output'}"


def start(case: Case, folder: Path, composed: DictConfig | None) -> tuple[int, Path]:
    """Fork a process that tries `case` in `folder`; returns its id and where its output goes.

    `composed` is the sound recipe with SETTINGS.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid, folder / "output"
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(folder / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for fd, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, fd)
        code = _command(case, folder, composed)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # an orderly end would touch, and so copy, every page of the imports


def _command(case: Case, folder: Path, composed: DictConfig | None) -> int:
    from llamarl.cli import main
    from llamarl.cli import train as jobs

    if not case.is_run:
        jobs.spawn_executors = _load  # type: ignore[assignment]
    settings: Sequence[str] = SETTINGS
    if composed is not None and not case.composes:
        settings = ()
        main.for_each_config = partial(_as_composed, composed, folder)
    recipe = f"--config-dir={folder}/recipe"
    train = ["llamarl", "train", recipe, *settings, *case.overrides]
    sys.argv = ["llamarl", "view", f"{folder}/run"] if case.is_viewed else train
    try:
        main.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001 - what the case is judged by
        traceback.print_exc()
        return 1
    return 0


def _as_composed(
    composed: DictConfig,
    folder: Path,
    program: str,
    arguments: list[str],
    work: Callable[[DictConfig, str], None],
) -> None:
    """In place of Hydra, which would take most of a case's time."""
    composed.recipe_dir = str(folder / "recipe")
    for key, _, value in (argument.partition("=") for argument in arguments[1:]):
        OmegaConf.update(composed, key, yaml.safe_load(value))
    run_dir = folder / composed.run_dir
    run_dir.mkdir(exist_ok=True)
    work(composed, str(run_dir))


async def _load(config: Any, inputs: Any, cluster: Any, run_dir: str, **_: Any) -> None:
    """In place of starting executors: load what they would load, read what the end will read."""
    import torch

    from llamarl.core import checkpoint
    from llamarl.core.process_group import join
    from llamarl.metrics.summary import summarize
    from llamarl.trainer.parallel import make_mesh
    from llamarl.trainer.policy import Policy

    join(f"{run_dir}/.rendezvous-fuzz", 0, 1, torch.device("cpu"))
    mesh = make_mesh("cpu", config.trainer)
    policy = Policy.load(inputs.checkpoint, mesh, config.trainer, 0, inputs.tokenizer_folder)
    newest = checkpoint.latest(run_dir)
    if newest is not None:
        policy.restore(str(newest))
    summarize(run_dir)
    raise SystemExit(0)


def _wait(pid: int, output: Path, limit_s: float) -> tuple[int | None, str, int]:
    """Exit code (None: it had to be killed), output, peak memory beside that of this process."""
    deadline = time.monotonic() + limit_s
    wait_s = 0.002
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found or time.monotonic() > deadline:
            break
        time.sleep(wait_s := min(0.02, wait_s * 1.5))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what it left behind
    if not found:
        os.wait4(pid, 0)
        return None, _read(output), 0
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return os.waitstatus_to_exitcode(status), _read(output), (usage.ru_maxrss - here) * 1024


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def try_all(
    makes: Iterable[Callable[[Path], Case]],
    sound: Path,
    composed: DictConfig,
    folder: Path,
    num_jobs: int,
) -> Iterator[CallResult]:
    """Make and try the cases in order, `num_jobs` at a time; `composed` as for `start`."""
    running: deque[tuple[Case, Path, tuple[int, Path]]] = deque()

    def end() -> CallResult:
        case, place, started = running.popleft()
        ended = outcome(case, started)
        shutil.rmtree(place)
        return ended

    for number, make in enumerate(makes):
        place = folder / f"case-{number}"
        copy_inputs(sound, place)
        case = make(place)
        running.append((case, place, start(case, place, composed)))
        if len(running) == num_jobs:
            yield end()
    while running:
        yield end()
