"""What streaming is worth in real runs: parts of a step, groups carried over, asynchrony.

    python tools/bench_streams.py --seeds 3 --steps 12 --json FILE

The quickstart's model and prompts with replayed lengths of two shapes: `tail`, that of
bench_async.py (log-normal, 99th percentile six times the mean), and `20k`, long reasoning with a
cap of 20,000 tokens, at a hundredth of the size (log-normal, median 3,000, spread 1, so 3 % reach
the cap). Every rollout is trained; all runs of a workload train equal rollouts.

Two replicas beside one trainer rank, S = 0 and S = 1: whole batches, fixed parts of a quarter of a
step, dynamic parts; and at S = 0 groups carried over. Then asynchrony: the best of `ASYNC` over the
best of `SYNC`. Runs take turns in a seed. A step's time is the median over the steps of all seeds
but the first two of each run.

`ideal_async_s` is what the least possible step would take: decoding in full batches, one part a
step, no messages, waits, checks or publishes, and every processor busy all the time, from the costs
of a token, a decode step and a part that were measured in the dynamic run of S = 1 (their times on
a free processor, slowed as they were measured to be beside another process).

`--simulate` adds a simulated run of StreamRL's size (streams_bench/simulated.py), in 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_async
import numpy as np
from staging_bench.exposure import measure, read_spans
from streams_bench.simulated import bands

from llamarl.metrics.metrics_log import read_metrics
from llamarl.planner.simulation.calibration import read_trace

ROOT = Path(__file__).resolve().parent.parent
ROLLOUTS = 8  # per prompt
MAX_NUM_SEQS = 128
NUM_SKIPPED = 2  # first steps of a run
SHRINK = 100  # of the 20k shape

TWO = ["generator.num_replicas=2"]
BATCH = ["trainer.parts=batch"]
SYNC = {
    "sync, 1 rank, 1 replica": ["staleness.max_staleness=0"],
    "sync, 1 rank, 1 replica, 2 threads": [
        "staleness.max_staleness=0",
        "cluster.threads_per_process=2",
    ],
    "sync, 2 ranks, 2 replicas": ["staleness.max_staleness=0", "trainer.num_ranks=2", *TWO],
}
SYNC |= {f"{name}, batch": [*options, *BATCH] for name, options in SYNC.items()}
ASYNC = {
    "async, 1 rank, 1 replica": ["staleness.max_staleness=1"],
    "async, 1 rank, 1 replica, staleness 2": ["staleness.max_staleness=2"],
    "async, 2 ranks, 1 replica": ["staleness.max_staleness=1", "trainer.num_ranks=2"],
    "async, 2 ranks, 2 replicas": ["staleness.max_staleness=1", "trainer.num_ranks=2", *TWO],
}


def part_modes(groups_per_step: int) -> dict[str, list[str]]:
    """The runs that differ in their parts, by (staleness, parts), and those that carry over."""
    fixed = ["trainer.parts=fixed", f"trainer.groups_per_part={groups_per_step // 4}"]
    parts = {"batch": BATCH, "fixed": fixed, "dynamic": ["trainer.parts=dynamic"]}
    modes = {
        f"S={s}, {name}": [f"staleness.max_staleness={s}", *TWO, *options]
        for s in (0, 1)
        for name, options in parts.items()
    }
    carried = [f"staleness.carry_over_groups={groups_per_step // 8}", "staleness.late=mask"]
    return modes | {"S=0, carried over": [*modes["S=0, dynamic"], *carried]}


def long_reasoning(num: int, seed: int = 0) -> list[int]:
    """Lengths under a cap of 20,000 tokens, divided by SHRINK."""
    draws = np.random.default_rng(seed).lognormal(np.log(3000), 1.0, num)
    return np.maximum(1, np.minimum(draws, 20_000) / SHRINK).astype(int).tolist()


WORKLOADS = {"tail": bench_async.long_tail, "20k": long_reasoning}


@dataclass
class Runs:
    """What all runs of a workload took."""

    recipe: Path
    folder: Path
    args: argparse.Namespace
    step_s: dict[str, list[float]] = field(default_factory=dict)
    """By mode, of all seeds."""
    folders: dict[str, Path] = field(default_factory=dict)
    """By mode, of the last seed."""

    def run(self, mode: str, options: list[str], seed: int) -> None:
        """Train once."""
        args = self.args
        self.folders[mode] = run_dir = self.folder / f"{len(self.folders)}-{seed}"
        command = [
            *(sys.executable, "-m", "llamarl", "train", f"--config-dir={self.recipe}"),
            *(f"run_dir={run_dir}", f"seed={seed}", f"num_steps={args.steps + NUM_SKIPPED}"),
            *("evaluation.every_steps=0", "metrics.live=false", "checkpoint.export=false"),
            *("checkpoint.every_steps=0", f"trainer.groups_per_step={args.groups}", *options),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        steps = list(read_metrics(run_dir / "metrics.jsonl").values())
        seconds = [step["time/step_s"] for step in steps if "time/step_s" in step][NUM_SKIPPED:]
        self.step_s.setdefault(mode, []).extend(seconds)
        busy = self.summary(mode)["both_busy_share"]
        median_s = statistics.median(seconds)
        print(
            f"  {mode:<40} seed {seed} {median_s:6.2f} s a step, both busy {busy:.0%}", flush=True
        )

    def median_s(self, mode: str) -> float:
        return statistics.median(self.step_s[mode])

    def best(self, modes: dict[str, list[str]]) -> str:
        return min((mode for mode in modes if mode in self.step_s), key=self.median_s)

    def summary(self, mode: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folders[mode] / "summary.json").read_text())
        return summary

    def metric(self, mode: str, tag: str) -> float:
        """The sum of a tag over a run's steps."""
        steps = read_metrics(self.folders[mode] / "metrics.jsonl").values()
        return sum(float(step.get(tag, 0.0)) for step in steps)


def ideal_step_s(run_dir: Path, num_rollouts: int) -> float:
    """Seconds of a step of `num_rollouts` in which every processor is always busy with what cannot
    be left out."""
    num_cores = len(os.sched_getaffinity(0))
    trace = read_trace(run_dir, ROLLOUTS, num_cores=num_cores)
    costs, scale = trace.costs, num_rollouts / len(trace.lengths)
    num_tokens = sum(trace.lengths) * scale
    num_prompts = num_rollouts / ROLLOUTS
    decode_s = num_tokens * (costs.decode_row_s + costs.decode_step_s / MAX_NUM_SEQS)
    prefill_s = num_prompts * trace.prompt_tokens * costs.prefill_token_s
    train_s = (num_tokens + num_rollouts * trace.prompt_tokens) * costs.token_s
    train_s += costs.part_s + costs.optimizer_s
    score_s = num_rollouts * (costs.score_row_s + 2 * costs.store_row_s)
    return (decode_s + prefill_s + train_s + score_s) / num_cores / costs.shared_speed


def figures_of(runs: Runs, modes: dict[str, list[str]]) -> dict[str, Any]:
    """The figures of one workload."""
    found: dict[str, Any] = {"step_s": {mode: runs.median_s(mode) for mode in runs.step_s}}
    for s in (0, 1):
        batch_s, fixed_s, dynamic_s = (
            runs.median_s(f"S={s}, {parts}") for parts in ("batch", "fixed", "dynamic")
        )
        found[f"dynamic_vs_batch_s{s}"] = batch_s / dynamic_s
        found[f"dynamic_vs_fixed_s{s}"] = fixed_s / dynamic_s
        exposure = measure(read_spans(runs.folders[f"S={s}, dynamic"] / "spans"), NUM_SKIPPED)
        found[f"exposed_s{s}"] = {
            "trainer_s": exposure.trainer_s,
            "interrupted_s": exposure.interrupted_s,
            "starved_s": exposure.starved_s,
            "publish_s": exposure.publish_s,
        }
    carried = "S=0, carried over"
    found["carried_vs_dynamic"] = runs.median_s("S=0, dynamic") / runs.median_s(carried)
    masked, trained = (runs.metric(carried, f"tokens/{kind}") for kind in ("masked", "trained"))
    found["carried_masked_share"] = masked / (masked + trained)
    sync, quick = runs.best(SYNC), runs.best(ASYNC)
    ideal_s = ideal_step_s(runs.folders["S=1, dynamic"], runs.args.groups * ROLLOUTS)
    found |= {
        "best_sync": sync,
        "best_async": quick,
        "async_vs_sync": runs.median_s(sync) / runs.median_s(quick),
        "ideal_async_s": ideal_s,
        "ideal_async_vs_sync": runs.median_s(sync) / ideal_s,
        "share_of_ideal": ideal_s / runs.median_s(quick),
        "both_busy_share": {mode: runs.summary(mode)["both_busy_share"] for mode in ASYNC},
    }
    return found


def write_recipe(folder: Path, shape: str) -> Path:
    """bench_async's recipe with the lengths of this shape."""
    recipe = folder / f"recipe-{shape}"
    bench_async.write_long_tail_recipe(recipe)
    (recipe / "lengths.json").write_text(json.dumps(WORKLOADS[shape](1 << 16)))
    text = (recipe / "run.yaml").read_text()
    most = max(WORKLOADS[shape](1 << 16))
    assert "max_tokens: 192" in text
    (recipe / "run.yaml").write_text(text.replace("max_tokens: 192", f"max_tokens: {most}"))
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run that count")
    parser.add_argument("--groups", type=int, default=64, help="groups of a step")
    parser.add_argument("--workloads", nargs="*", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--quick", action="store_true", help="one small run of each mode")
    parser.add_argument("--simulate", action="store_true", help="the simulated run too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.groups, args.workloads = 1, 3, 16, ["tail"]
    figures: dict[str, Any] = {"seeds": args.seeds, "steps": args.steps, "groups": args.groups}
    modes = part_modes(args.groups)
    with tempfile.TemporaryDirectory() as temporary:
        for shape in args.workloads:
            print(shape)
            folder = Path(temporary) / shape
            runs = Runs(write_recipe(Path(temporary), shape), folder, args)
            for seed in range(args.seeds):
                for mode, options in {**modes, **SYNC, **ASYNC}.items():
                    runs.run(mode, options, seed)
            figures[shape] = figures_of(runs, modes)
            print(json.dumps(figures[shape], indent=2), flush=True)
    if args.simulate:
        figures["simulated"] = bands()
        print(json.dumps(figures["simulated"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
