"""The quickstart with three replicas, of which one after another is killed, stopped or slowed.

Usage: python tools/chaos_generators.py [--faults N] [--period-s S] [--seed N] [--json FILE]
                                        [OVERRIDE ...]

After each `period-s` one replica that serves is hit: killed (SIGKILL), stopped until it counts as
lost (SIGSTOP), or slowed for five seconds (stopped and continued in turn). The run goes on for as
many steps as the faults need. It fails unless the run ends well, its accuracy is within
`ACCURACY_NOISE` of an undisturbed run of as many steps, every rollout is trained exactly once and
within the staleness bound, and neither a process, a file in /dev/shm, nor a socket of it is left.

`recovery_s`: from a kill, or from the moment at which a stopped replica counts as lost, until one
takes requests in its place; `num_files_left` and `num_maps_left`: open files of controller and
trainer, and their shared mappings, at the end beyond those before the first fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from llamarl.control import Message, ask

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("kill", "stop", "slow")
LIVENESS_S = 5.0  # cluster.liveness_timeout_s of the runs
SLOW_S, SLOW_STOP_S, SLOW_GO_S = 5.0, 0.2, 0.1
ACCURACY_NOISE = 0.02  # of held-out accuracy between runs of different seeds
RECOVERY_LIMIT_S = 120.0
STEPS_MORE = 3  # after the last fault
NEVER = 100_000


@dataclass
class Run:
    """A training run in a process of its own, whose descendants inherit `mark`."""

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    faults: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, overrides: list[str]) -> Run:
        mark = f"LLAMARL_CHAOS_{uuid.uuid4().hex}"
        recipe = f"--config-dir={ROOT / 'recipes' / 'quickstart'}"
        command = [sys.executable, "-m", "llamarl", "train", recipe, f"run_dir={folder}"]
        environment = {**os.environ, mark: "1", "OMP_NUM_THREADS": "1"}
        log = folder.with_suffix(".log").open("w")
        process = subprocess.Popen(
            [*command, *overrides], stdout=log, stderr=subprocess.STDOUT, text=True, env=environment
        )
        return cls(folder, process, mark)

    def status(self) -> Message:
        """What the run says of itself; SystemExit with its output if it has ended."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended early:\n{self.output()[-3000:]}")
            with suppress(ValueError):
                return ask(str(self.folder), {"ask": "status"})
            time.sleep(0.1)

    def replicas(self, state: str = "serving") -> dict[str, int]:
        """Name -> pid of the replicas in this state."""
        rows = self.status()["executors"]
        return {
            row["executor"]: int(row["pids"])
            for row in rows
            if row["executor"].startswith("generator") and row["state"] == state and row["pids"]
        }

    def family(self) -> list[int]:
        """Living processes that inherited the mark."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_zombie = ") Z " in (folder / "stat").read_text()
                if self.mark.encode() in (folder / "environ").read_bytes() and not is_zombie:
                    pids.append(int(folder.name))
        return pids

    def wait_for_version(self, version: int) -> None:
        while self.status()["version"] < version:
            time.sleep(0.2)

    def output(self) -> str:
        return self.folder.with_suffix(".log").read_text()


def hit(run: Run, kind: str, rng: random.Random) -> None:
    """One fault, and what it takes until the replica serves again."""
    while not (serving := run.replicas()):
        time.sleep(0.1)
    name = rng.choice(sorted(serving))
    pid = serving[name]
    run.faults[kind] += 1
    with suppress(ProcessLookupError):
        if kind == "slow":
            end_s = time.monotonic() + SLOW_S
            while time.monotonic() < end_s:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(SLOW_STOP_S)
                os.kill(pid, signal.SIGCONT)
                time.sleep(SLOW_GO_S)
            return
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    lost_s = time.monotonic()
    while run.replicas().get(name, pid) == pid:
        if kind == "stop" and name in run.replicas():
            lost_s = time.monotonic()  # it still counts as well
        if time.monotonic() - lost_s > RECOVERY_LIMIT_S:
            raise SystemExit(f"{name} does not serve {RECOVERY_LIMIT_S:g} s after it was lost")
        time.sleep(0.1)
    run.recovery_s.append(time.monotonic() - lost_s)


def held(run: Run) -> tuple[int, int]:
    """Open files, and shared mappings, of controller and trainer."""
    rows = run.status()["executors"]
    pids = [run.process.pid, *(int(r["pids"]) for r in rows if r["executor"] == "trainer")]
    files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    maps = sum(
        line.split()[1].endswith("s")
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
    )
    return files, maps


def disturb(run: Run, num_faults: int, period_s: float, seed: int) -> dict[str, Any]:
    """Hit the run again and again; what is held more at the end than at the start."""
    rng = random.Random(seed)
    run.wait_for_version(2)
    while len(run.replicas()) < 3:
        time.sleep(0.1)
    before = held(run)
    kinds = [KINDS[i % len(KINDS)] for i in range(num_faults)]
    rng.shuffle(kinds)
    for kind in kinds:
        time.sleep(period_s)
        hit(run, kind, rng)
    while len(run.replicas()) < 3:
        time.sleep(0.1)
    run.wait_for_version(run.status()["version"] + 2)
    after = held(run)
    return {"num_files_left": after[0] - before[0], "num_maps_left": after[1] - before[1]}


def last_step(run: Run) -> int:
    """End the run after a few more steps; returns its last version."""
    run.wait_for_version(run.status()["version"] + STEPS_MORE)
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(timeout=120)
    state = max((run.folder / "checkpoints").glob("step-*")) / "controller.json"
    return int(json.loads(state.read_text())["version"])


def finish(run: Run) -> dict[str, Any]:
    """The summary of a run, once it has ended."""
    if run.process.wait(timeout=900):
        raise SystemExit(f"the run failed:\n{run.output()[-3000:]}")
    if left := run.family():
        raise SystemExit(f"processes are left: {left}")
    summary: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    return summary


def check_rollouts(folder: Path, num_steps: int, per_step: int) -> None:
    """Every rollout of every step was trained exactly once."""
    files = (folder / "archive").glob("rollouts-*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    trained = [line["row_id"] for line in lines if line["outcome"] == "trained"]
    if len(trained) != len(set(trained)) or len(trained) != num_steps * per_step:
        wanted = num_steps * per_step
        raise SystemExit(f"{wanted} rollouts must be trained once each, got {len(trained)} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--period-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = [
        "generator.num_replicas=3",
        "generator.max_restarts=1000",
        f"cluster.liveness_timeout_s={LIVENESS_S:g}",
        "evaluation.every_steps=0",
        "trainer.schedule=constant",  # the number of steps is not known before
        *options.overrides,
    ]
    shm = {path.name for path in Path("/dev/shm").iterdir()}
    with tempfile.TemporaryDirectory() as temporary:
        run = Run.start(Path(temporary, "chaos"), [*overrides, f"num_steps={NEVER}"])
        left = disturb(run, options.faults, options.period_s, options.seed)
        num_steps = last_step(run) + 1
        if left_processes := run.family():
            raise SystemExit(f"processes are left: {left_processes}")
        ending = [*overrides, f"num_steps={num_steps}", "checkpoint.resume=auto"]
        chaos = finish(Run.start(run.folder, ending))  # a last step, and the evaluation
        check_rollouts(run.folder, num_steps, chaos["rollouts_trained"] // num_steps)
        calm = finish(Run.start(Path(temporary, "calm"), [*overrides, f"num_steps={num_steps}"]))
    figures = {
        "num_steps": num_steps,
        "faults": dict(run.faults),
        "accuracy": chaos["accuracy_after"],
        "accuracy_undisturbed": calm["accuracy_after"],
        "staleness_max": chaos["staleness_max"],
        "recovery_s": {
            "median": round(median(run.recovery_s), 2),
            "longest": round(max(run.recovery_s), 2),
        },
        "num_shared_memory_left": len({path.name for path in Path("/dev/shm").iterdir()} - shm),
        **left,
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    assert figures["num_shared_memory_left"] == 0, "shared memory is left"
    assert figures["staleness_max"] <= 1, "tokens were older than staleness.max_staleness"
    difference = figures["accuracy_undisturbed"] - figures["accuracy"]
    assert difference <= ACCURACY_NOISE, f"accuracy is {difference:.1%} lower"


if __name__ == "__main__":
    main()
