"""A run of which processes are killed, stopped for ever, or stopped and woken, at all its moments.

Usage: python -m tests.e2e.chaos [--faults N] [--seed N] [--json FILE] [OVERRIDE ...]

The run is made in legs: each is a command that goes on from the one before and makes some steps
more. An attack signals one to three of a leg's processes, any but the controller, at a moment that
is drawn: while it starts (the first leg) or resumes, in a step, a publish, a save, an evaluation,
or when it ends (evaluation, save, export and close). A leg must end well; one that was hit before
its first step may also end with one line and exit code 1, and is then tried again.

After each leg neither a process, a socket, nor a file of it is left but those that belong to its
results, every step has one record, every evaluation is of all prompts, and every rollout has one
outcome, as many as the steps take being trained. In the end the accuracy must be that of an
undisturbed run of as many steps, less `ACCURACY_NOISE`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.controller.control import Message, ask
from tests.e2e.commands import RECIPE, SMALL, Command, read_archive, start, told_of

log = logging.getLogger(__name__)

KINDS = "kill", "stop", "wake"
LIVENESS_S = 5.0  # cluster.liveness_timeout_s of the runs
START_S = 10.0  # about what a start takes
RECOVERY_LIMIT_S = 180.0
CLOSE_LIMIT_S = 10.0
SAVE_EVERY, EVALUATE_EVERY = 2, 3
ACCURACY_NOISE = 0.02  # of held-out accuracy between runs of different seeds
NUM_UNITS = 2
CONNECTION = "connection to a storage unit"
OPENED_LATE = Counter(  # maybe after the first step; a unit lends the file for large messages
    {CONNECTION: NUM_UNITS, "/memfd:llamarl (deleted)": NUM_UNITS}
)
SETTINGS = [
    "generator.max_restarts=1000",
    "cluster.max_restarts=1000",
    f"cluster.liveness_timeout_s={LIVENESS_S:g}",
    f"checkpoint.every_steps={SAVE_EVERY}",
    f"evaluation.every_steps={EVALUATE_EVERY}",
    "trainer.schedule=constant",  # the number of steps grows from leg to leg
    "checkpoint.resume=auto",
]
PROCESSES = [  # two of each kind that there can be two of, a frozen model, and a collector
    "generator.num_replicas=2",
    "trainer.num_ranks=2",
    f"experience.units_per_host={NUM_UNITS}",
    "algorithm.kl_coefficient=0.001",
    "generator.num_collectors=1",
]


SMALL_RUN = [  # the above in a few seconds
    *PROCESSES,
    *SMALL,
    f"evaluation.every_steps={EVALUATE_EVERY}",
    "cluster.liveness_timeout_s=2",
]


@dataclass
class Leg:
    """One command of the run, and what it does."""

    folder: Path
    first: int  # the version it starts from
    num_steps: int
    command: Command
    output: Path
    attacks: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, first: int, num_steps: int, overrides: list[str]) -> Leg:
        output = folder.with_suffix(".log")
        recipe = f"--config-dir={RECIPE}"
        words = ["train", recipe, f"run_dir={folder}", f"num_steps={num_steps}"]
        with output.open("w") as file:
            command = start(*words, *SETTINGS, *overrides, output=file)
        return cls(folder, first, num_steps, command, output)

    @property
    def is_running(self) -> bool:
        return self.command.process.poll() is None

    @property
    def version(self) -> int:
        """Of the newest step that has a record."""
        return max((line["step"] for line in self.records()), default=0)

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; the last may be half written."""
        records = []
        with suppress(FileNotFoundError, json.JSONDecodeError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                records.append(json.loads(line))
        return records

    def status(self) -> Message | None:
        """What the run says of itself, unless it starts or ends."""
        with suppress(ValueError):
            return ask(str(self.folder), {"ask": "status"})
        return None

    def victims(self) -> list[int]:
        """All processes but the controller."""
        return sorted(set(self.command.family()) - {self.command.process.pid})

    def files(self) -> Counter[str]:
        """Open files of the controller by what they are, when fewest are open."""
        found = []
        for _ in range(10):
            inodes = {inode_of(line) for line in self.sockets() if is_connection(line)}
            links = [CONNECTION if inode_of_link(link) in inodes else link for link in self.links()]
            found.append(Counter(re.sub(r"\d+", "", link) for link in links))
            time.sleep(0.05)
        return min(found, key=Counter.total)

    def sockets(self) -> list[str]:
        """The controller's unix sockets, with their paths."""
        inodes = {inode_of_link(link) for link in self.links()}
        lines = Path("/proc/net/unix").read_text().splitlines()
        return [line for line in lines if inode_of(line) in inodes]

    def links(self) -> Iterator[str]:
        """What each open file of the controller is."""
        for path in Path(f"/proc/{self.command.process.pid}/fd").glob("*"):
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(path)


def inode_of_link(link: str) -> str:
    """Return the inode of a socket, or what else the open file is."""
    return link.removeprefix("socket:[").removesuffix("]")


def inode_of(line: str) -> str:
    """Return the inode of a line of /proc/net/unix."""
    return line.split()[6]


def is_connection(line: str) -> bool:
    """Return whether a line of /proc/net/unix is a connection that keeps packets apart: to a
    storage unit, or of `ask`, which hangs up at once."""
    return line.split()[4:6] == ["0005", "03"]


def is_publishing(leg: Leg) -> bool:
    status = leg.status()
    rows = status["executors"] if status else []
    behind = [r for r in rows if r["state"] == "serving" and r["version"] < status["version"]]
    return bool(behind) or not leg.is_running


def is_saving(leg: Leg) -> bool:
    return any((leg.folder / "checkpoints").glob("unfinished-*"))


def is_evaluating(leg: Leg) -> bool:
    last = leg.version
    known = {line["step"] for line in leg.records() if "evaluation/accuracy" in line}
    return last > leg.first and last % EVALUATE_EVERY == 0 and last not in known


def is_ending(leg: Leg) -> bool:
    return leg.version >= leg.num_steps


MOMENTS: dict[str, Callable[[Leg], bool]] = {
    "step": lambda leg: leg.version > leg.first,
    "publish": is_publishing,
    "save": is_saving,
    "evaluation": is_evaluating,
    "end": is_ending,
}


def wait_for(leg: Leg, what: str, is_there: Callable[[], bool]) -> bool:
    """Until then, or until the leg has ended; returns whether it is there. Fails if no step is made
    for `RECOVERY_LIMIT_S`."""
    version, end_s = leg.version, time.monotonic() + RECOVERY_LIMIT_S
    while leg.is_running:
        if is_there():
            return True
        if leg.version > version:
            version, end_s = leg.version, time.monotonic() + RECOVERY_LIMIT_S
        if time.monotonic() > end_s:
            text = "\n".join([*leg.attacks, leg.output.read_text()[-4000:], str(leg.status())])
            raise AssertionError(f"{what} was not there within {RECOVERY_LIMIT_S:g} s:\n{text}")
        time.sleep(0.01)
    return False


def name_of(pid: int) -> str:
    """The executor of a process."""
    found = re.search(r"LLAMARL_EXECUTOR=[^\0]*/([^\0/]*)", told_of(pid, "environ"))
    return found[1] if found else told_of(pid, "cmdline").replace("\0", " ")[:100]


def attack(leg: Leg, moment: str, rng: random.Random, faults: Counter[str]) -> None:
    """Signal one to three processes."""
    victims = leg.victims()
    for pid in rng.sample(victims, min(len(victims), rng.choice([1, 1, 2, 3]))):
        kind, name = rng.choice(KINDS), name_of(pid)
        leg.attacks.append(f"version {leg.version}, {moment}: {kind} {name}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            faults.update([kind, moment, name])
        if kind == "wake":
            threading.Timer(rng.uniform(0.5, 1.6 * LIVENESS_S), wake, [pid]).start()


def wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def recover(leg: Leg) -> None:
    """Returns once the leg makes steps again with all its executors, or has ended."""
    before, began_s = leg.version, time.monotonic()

    def is_whole() -> bool:
        status = leg.status()
        states = {row["state"] for row in status["executors"]} if status else set()
        return bool(states) and states <= {"serving", "running"} and leg.version > before

    if wait_for(leg, "the next step", is_whole):
        leg.recovered_s.append(time.monotonic() - began_s)


def disturb(leg: Leg, moments: list[str], rng: random.Random, faults: Counter[str]) -> None:
    """Attack at these moments, as many as the leg has."""
    if "start" in moments:
        time.sleep(rng.uniform(0.0, START_S))
        attack(leg, "start" if leg.first == 0 else "resume", rng, faults)
    if not wait_for(leg, "the first step", lambda: leg.version > leg.first):
        return
    files = leg.files() | OPENED_LATE
    for moment in moments:
        if moment in ("start", "end") or leg.version >= leg.num_steps - 1:
            continue
        if wait_for(leg, moment, lambda now=MOMENTS[moment]: now(leg) or is_ending(leg)):
            time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.5)]))
            attack(leg, moment, rng, faults)
            recover(leg)
    check_files(leg, files)
    if wait_for(leg, "the end", lambda: is_ending(leg)) and "end" in moments:
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 3.0)]))
        attack(leg, "end", rng, faults)


def check_files(leg: Leg, before: Counter[str]) -> None:
    """The controller has no more open files than before; what is lost may take a while to close."""
    end_s = time.monotonic() + CLOSE_LIMIT_S
    while (more := leg.files() - before) and leg.is_running:
        assert time.monotonic() < end_s, (
            f"the controller has {more} more after {leg.attacks}; its sockets: {leg.sockets()}"
        )


def check_end(leg: Leg) -> bool:
    """Whether a leg has done its steps; if not, it was hit at its start and said so."""
    code, text = leg.command.process.wait(timeout=RECOVERY_LIMIT_S), leg.output.read_text()
    told = "\n".join([*leg.attacks, text[-4000:]])
    left = leg.command.wait_until_gone(5.0)
    assert left == [], f"processes are left: {left}\n{told}"
    if code == 1 and leg.version == leg.first and leg.attacks:
        assert "Traceback" not in text, told
        return False
    assert code == 0, f"exit code {code}:\n{told}"
    assert "Traceback" not in text, told
    return True


def check_records(leg: Leg, num_prompts: int, per_step: int) -> None:
    """One record per step, whole evaluations, one outcome per rollout, nothing half done."""
    told = "\n".join(leg.attacks)
    assert (leg.folder / "export" / "model.safetensors").is_file(), told
    names = {path.name for path in leg.folder.iterdir() if path.name.startswith(".")}
    assert names == {".lock"}, f"{names} are left: {told}"
    assert not [*leg.folder.glob("**/unfinished*")], told
    steps = [line["step"] for line in leg.records() if "reward/mean" in line]
    assert steps == list(range(1, leg.num_steps + 1)), f"{steps}\n{told}"
    evaluated = [line for line in leg.records() if "evaluation/accuracy" in line]
    versions = [line["step"] for line in evaluated]
    assert len(versions) == len(set(versions)), f"{versions}\n{told}"
    assert {line["evaluation/prompts"] for line in evaluated} == {num_prompts}, told
    # What is lost once the last version is made may cost its evaluation and lines of the archive.
    lacks = rf"version {leg.num_steps} (has no held-out accuracy|may lack its evaluation)"
    is_short = re.search(lacks, leg.output.read_text()) is not None
    assert is_short or versions[-1] == leg.num_steps, told
    lines = read_archive(leg.folder)
    ids = [line["row_id"] for line in lines]
    twice = [row for row, times in Counter(ids).items() if times > 1]
    assert not twice, f"rows {twice} have two outcomes: {told}"
    trained = Counter(line["version"] for line in lines if line["outcome"] == "trained")
    last = leg.num_steps - 1
    wrong = {v: trained[v] for v in range(leg.first, leg.num_steps) if trained[v] != per_step}
    assert wrong.keys() <= {last} if is_short else not wrong, f"trained by version: {wrong}\n{told}"
    summary = json.loads((leg.folder / "summary.json").read_text())
    assert summary["steps"] == leg.num_steps, told
    assert summary["staleness_max"] <= 1, f"older than staleness.max_staleness: {told}"


@dataclass
class Chaos:
    """A run and what was done to it. `faults`: how often each kind, moment and executor."""

    folder: Path
    overrides: list[str]
    rng: random.Random
    num_prompts: int
    per_step: int
    steps_per_leg: int = 12
    faults: Counter[str] = field(default_factory=Counter)
    num_legs: int = 0
    num_refused: int = 0
    recovered_s: list[float] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(self.faults[kind] for kind in KINDS)

    @property
    def num_steps(self) -> int:
        return self.num_legs * self.steps_per_leg

    def run_leg(self, moments: list[str]) -> None:
        """A leg that is hit at these moments."""
        shared = set(os.listdir("/dev/shm"))
        first, last = self.num_steps, self.num_steps + self.steps_per_leg
        while True:
            leg = Leg.start(self.folder, first, last, self.overrides)
            try:
                disturb(leg, moments, self.rng, self.faults)
                is_done = check_end(leg)
            finally:
                leg.command.process.kill()
            assert set(os.listdir("/dev/shm")) <= shared, leg.attacks
            log.info("%d faults, %d steps: %s", self.num_faults, leg.version, leg.attacks)
            if is_done:
                break
            self.num_refused += 1
            moments = [moment for moment in moments if moment != "start"]
        self.recovered_s += leg.recovered_s
        check_records(leg, self.num_prompts, self.per_step)
        self.num_legs += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rng, began_s = random.Random(options.seed), time.monotonic()
    overrides = [*PROCESSES, *options.overrides]
    with tempfile.TemporaryDirectory() as temporary:
        chaos = Chaos(Path(temporary, "chaos"), overrides, rng, num_prompts=1000, per_step=512)
        while chaos.num_faults < options.faults:
            middle = ["step", "publish", "save", "evaluation"]
            rng.shuffle(middle)
            ends = [each for each in ("start", "end") if rng.random() < 0.7]
            chaos.run_leg([*middle, *ends])
        calm = Chaos(Path(temporary, "calm"), overrides, rng, num_prompts=1000, per_step=512)
        calm.steps_per_leg = chaos.num_steps
        calm.run_leg([])
        after, undisturbed = (
            json.loads((each.folder / "summary.json").read_text())["accuracy_after"]
            for each in (chaos, calm)
        )
    figures = {
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "num_steps": chaos.num_steps,
        "num_faults": chaos.num_faults,
        "faults": dict(sorted(chaos.faults.items())),
        "starts_refused": chaos.num_refused,
        "recovery_s": {
            "median": round(statistics.median(chaos.recovered_s), 1),
            "max": round(max(chaos.recovered_s), 1),
        },
        "accuracy": after,
        "accuracy_undisturbed": undisturbed,
    }
    text = json.dumps(figures, indent=2)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")
    assert undisturbed - after <= ACCURACY_NOISE


if __name__ == "__main__":
    main()
