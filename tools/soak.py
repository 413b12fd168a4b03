"""A run of very many, very small steps: what its processes keep, and whether it becomes slower.

    python tools/soak.py [--steps 2000] [--json FILE] [--run-dir FOLDER] [OVERRIDE ...]

A step trains the quickstart's model on two groups of two rollouts of four tokens, with a publish
and a line of metrics as always. Meanwhile private memory (RssAnon) and open descriptors of each
process are read four times a second. The first quarter of the steps warms up and is left out.

`growth_bytes_per_step` is the slope of the line through a process's memory over the other steps,
`late_growth_bytes_per_step` that of their second half alone: less than the first one says that
growth ends. `memory_bytes` and `num_files` are [after the warm-up, at the end].
`first_steps_per_s` and `last_steps_per_s` are of the first and the last quarter of what is counted,
`steps_ratio` is the last over the first.

To find what keeps memory, leave one thing out: `metrics.trackers=[]`, `cluster=inline`, or in the
environment MALLOC_ARENA_MAX=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from demo_two_hosts import children
from harness import Bench
from live_run import QUIET, RECIPE, LiveRun, command, environment
from weights_bench.memory import private_bytes

SMALL = (
    *("trainer.groups_per_step=2", "sampling.rollouts_per_prompt=2", "sampling.max_tokens=4"),
    *("generator.max_num_seqs=16", "generator.max_model_len=64", "checkpoint.every_steps=0"),
)
EVERY_S = 0.25
WARM_UP = 0.25  # of the steps
MIN_STEPS = 40


class Sample(NamedTuple):
    """What one process has at a moment."""

    unix_s: float
    private_bytes: int
    num_files: int


Samples = dict[str, list[Sample]]
"""By process: controller, trainer-0, ..."""


def watch(process: subprocess.Popen[bytes]) -> Samples:
    """Look at a run and all that it starts, until it ends."""
    samples: Samples = defaultdict(list)
    while process.poll() is None:
        for name, pid in processes(process.pid).items():
            with suppress(OSError):  # it has just ended
                num_files = len(os.listdir(f"/proc/{pid}/fd"))
                samples[name].append(Sample(time.time(), private_bytes(pid), num_files))
        with suppress(subprocess.TimeoutExpired):
            process.wait(EVERY_S)
    return samples


def processes(controller: int) -> dict[str, int]:
    """The pid of each executor's process, by its name, and of the controller. A process that an
    executor starts has its name and a higher pid."""
    found = {"controller": controller}
    with suppress(OSError):  # one of them has just ended
        for pid in sorted(children(controller)):
            words = Path(f"/proc/{pid}/environ").read_text(errors="replace")
            if named := re.search(r"LLAMARL_EXECUTOR=[^\0]*/([^\0]+)", words):
                found.setdefault(named[1], pid)
    return found


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Of the line through the points."""
    return float(np.polyfit(steps, values, 1)[0])


def figures(bench: Bench, run: LiveRun, samples: Samples) -> None:
    """Add what samples and steps of a finished run say."""
    ended_s = np.array([step["unix_s"] for step in run.steps])
    first = int(len(ended_s) * WARM_UP)
    quarter = (len(ended_s) - first) // 4
    rates = [
        quarter / (ended_s[end] - ended_s[end - quarter])
        for end in (first + quarter, len(ended_s) - 1)
    ]
    names = ("num_steps", "first_steps_per_s", "last_steps_per_s", "steps_ratio")
    bench.add_all(dict(zip(names, (len(ended_s), *rates, rates[1] / rates[0]), strict=True)))
    for name, all_samples in samples.items():
        counted = [each for each in all_samples if ended_s[first] <= each.unix_s <= ended_s[-1]]
        if len(counted) < 4:
            continue  # a process that came late or was gone early
        steps = np.interp([each.unix_s for each in counted], ended_s, np.arange(len(ended_s)))
        held = [each.private_bytes for each in counted]
        half = len(held) // 2
        bench.add_all(
            {
                "growth_bytes_per_step": slope(steps, held),
                "late_growth_bytes_per_step": slope(steps[half:], held[half:]),
                "memory_bytes": [held[0], held[-1]],
                "num_files": [counted[0].num_files, counted[-1].num_files],
            },
            name,
        )


def main() -> None:
    """Measure."""
    bench = Bench(__doc__)
    bench.option("--steps", type=int, default=2000)
    bench.option("--run-dir", type=Path, help="keep the run's folder here")
    bench.option("overrides", nargs="*", help="of the recipe")
    arguments = bench.parse()
    if arguments.steps < MIN_STEPS:
        sys.exit(f"soak: --steps must be at least {MIN_STEPS}, got {arguments.steps}")
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        run_dir = arguments.run_dir or Path(folder, "run")
        own = (*QUIET, *SMALL, "data.held_out=null", f"num_steps={arguments.steps}")
        words = command(RECIPE, run_dir, *own, *arguments.overrides)
        with Path(folder, "said").open("wb+") as said:
            with subprocess.Popen(words, env=environment(), stdout=said, stderr=said) as process:
                samples = watch(process)
            if process.returncode:
                said.seek(0)
                sys.exit(f"{' '.join(words)}\n{said.read().decode()}")
        figures(bench, LiveRun(run_dir), samples)
    bench.write({name: [list(each) for each in found] for name, found in samples.items()})


if __name__ == "__main__":
    main()
