"""Commands that train by the shipped recipe, and the processes and files they leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from llamarl.controller.control import ask
from tests.places import RECIPE
from tests.signals import restore_ctrl_c

Found = TypeVar("Found")
LIMIT_S = 300.0  # for what is awaited, on a machine with other work
SMALL = [
    "trainer.groups_per_step=8",
    "trainer.lr=5e-4",
    "trainer.warmup_steps=0",
    "evaluation.max_prompts=16",
    "evaluation.every_steps=0",
]


@dataclass
class Command:
    """A `llamarl` process whose descendants can be recognised by a variable they inherit."""

    process: subprocess.Popen[str]
    mark: str

    def family(self) -> list[int]:
        """Pids of every process, however orphaned, that inherited the mark."""
        pids = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    environment = (folder / "environ").read_bytes()
                    is_zombie = ") Z " in (folder / "stat").read_text()
                except (OSError, ProcessLookupError):
                    continue
                if self.mark.encode() in environment and not is_zombie:
                    pids.append(int(folder.name))
        return pids

    def wait_until_gone(self, limit_s: float) -> list[int]:
        end_s = time.monotonic() + limit_s
        while self.family() and time.monotonic() < end_s:
            time.sleep(0.1)
        return self.family()


def start(*arguments: str, output: IO[str] | None = None) -> Command:
    """Without `output`, which gets all that it prints, the test reads two pipes at the end."""
    mark = f"LLAMARL_TEST_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl", *arguments],
        stdout=output or subprocess.PIPE,
        stderr=output or subprocess.PIPE,
        text=True,
        env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=restore_ctrl_c,
    )
    return Command(process, mark)


def train(run_dir: Path, *overrides: str) -> Command:
    return start("train", f"--config-dir={RECIPE}", f"run_dir={run_dir}", *SMALL, *overrides)


def finish(command: Command, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    out, err = command.process.communicate(timeout=limit_s)
    return command.process.returncode, out, err


def wait_until(command: Command, what: str, find: Callable[[], Found]) -> Found:
    """What is found at last, while the command runs."""
    end_s = time.monotonic() + LIMIT_S
    while not (found := find()):
        assert time.monotonic() < end_s, f"{what} was not there within {LIMIT_S:g} s"
        assert command.process.poll() is None, command.process.communicate()
        time.sleep(0.005)
    return found


def has_step(run_dir: Path, step: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def wait_for_step(command: Command, run_dir: Path, step: int) -> None:
    wait_until(command, f"step {step}", lambda: has_step(run_dir, step))


def wait_for_restart(command: Command, run_dir: Path, name: str) -> None:
    """Until it works again after one restart."""

    def works() -> bool:
        rows = ask(str(run_dir), {"ask": "status"})["executors"]
        (row,) = (row for row in rows if row["executor"] == name)
        return row["state"] in ("serving", "running") and row["restarts"] == 1

    wait_until(command, f"{name} again", works)


def wait_for_other(command: Command, role: str, pids: list[int]) -> list[int]:
    """The pids of the processes that take the place of these, as soon as there are any."""
    new = lambda: [pid for pid in executors(command, role) if pid not in pids]  # noqa: E731
    return wait_until(command, f"another {role}", new)


KEEPING = ["checkpoint.every_steps=2", "experience.keep_rollouts=1"]


def read_archive(run_dir: Path) -> list[dict[str, Any]]:
    files = (run_dir / "archive").glob("rollouts-*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def read_rollouts(run_dir: Path) -> list[dict[str, Any]]:
    """The archive, and in the lines of rollouts that were kept whole what else is known of them."""
    kept = {}
    for path in (run_dir / "archive").glob("kept-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            assert (line["row_id"], line["outcome"]) not in kept, "a rollout is there twice"
            known = {name: value for name, value in line.items() if value is not None}
            kept[line["row_id"], line["outcome"]] = known
    lines = read_archive(run_dir)
    found = [line | kept.pop((line["row_id"], line["outcome"]), {}) for line in lines]
    assert not kept, "every rollout that is kept is in the archive"
    return found


def executors(command: Command, role: str) -> list[int]:
    """Pids of a role's processes, without those they started."""
    mark = re.compile(rf"LLAMARL_EXECUTOR=[^\0]*/{role}(\0|$)")
    pids = [pid for pid in command.family() if mark.search(told_of(pid, "environ"))]
    return [pid for pid in pids if not is_reward_worker(pid)]


def reward_workers(family: list[int]) -> list[int]:
    """Those that run reward code: each is the child of one that supervises it."""
    pids = [pid for pid in family if is_reward_worker(pid)]
    return [pid for pid in pids if parent_of(pid) in pids]


def parent_of(pid: int) -> int:
    return int(told_of(pid, "stat").rpartition(")")[2].split()[1])


def is_reward_worker(pid: int) -> bool:
    return "llamarl.scoring.user_code.worker" in told_of(pid, "cmdline")


def told_of(pid: int, file: str) -> str:
    """What /proc says of a process; nothing if it has ended meanwhile, as short-lived ones do."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def newest_state(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    state: dict[str, Any] = json.loads((newest / "controller.json").read_text())
    return state
