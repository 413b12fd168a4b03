"""Asynchronous against synchronous training: the same program, the same recipe, equal rollouts.

    python tools/bench_async.py --seeds 3 --steps 20 [--quick] --json FILE

Two workloads: the quickstart recipe as it stands, and the same recipe with a pinned long tail of
lengths (log-normal, fixed seed, 99th percentile six times the mean, cap eight times), replayed
token for token, with rewards drawn from the text so that every rollout is trained.

Synchronous means `staleness.max_staleness=0`. It is given its best of four shapes: one thread per
executor; two threads per executor; two trainer ranks and two replicas, with parts of a step or with
whole batches. Asynchronous is given its best of staleness 1 and 2, fewer slots, two trainer ranks.
Modes take turns in a seed; `ratio` takes medians over seeds of the seconds from the first step's
start to the last one's end. `duel_ratio` is more exact: the best of both kinds run in pairs, one
directly after the other, and it is the median of the pairs' ratios.
--quick: one small run of either kind with the long tail, and no pairs; its ratio says nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import Bench, Rounds, Values, medians
from live_run import INLINE, QUIET, RECIPE, train

SYNC = ["staleness.max_staleness=0"]
ASYNC = ["staleness.max_staleness=1"]
# Weights are gathered once a step: on one machine that costs memory, and saves time.
RANKS = ["trainer.num_ranks=2", "trainer.reshard_after=step"]
BOTH = [*RANKS, "generator.num_replicas=2"]
WORKLOADS = ("quickstart", "long_tail")
MODES = {
    "sync, 1 thread": SYNC,
    "sync, 2 threads": [*SYNC, "cluster.threads_per_process=2"],
    "sync, 2 ranks": [*SYNC, *BOTH],
    "sync, 2 ranks, batch": [*SYNC, *BOTH, "trainer.parts=batch"],
    "async, staleness 1": ASYNC,
    "async, 64 slots": [*ASYNC, "generator.max_num_seqs=64"],
    "async, 2 ranks": [*ASYNC, *RANKS],
    "async, staleness 2": ["staleness.max_staleness=2"],
}
QUICK = ("trainer.groups_per_step=4", INLINE)
MEAN_TOKENS = 24
# A log-normal's p99 over its mean is exp(2.326 s - s^2 / 2): six at s = 1.14 or so.
TAIL_SPREAD = float(np.roots([0.5, -2.3263, np.log(6.0)]).min())
TASK = '''"""Rewards drawn from the text: half of them 1, so that every group trains."""

import zlib


def reward(prompt, completion):
    return float(zlib.crc32(completion.encode()) & 1)
'''


def long_tail(num: int, seed: int = 0) -> list[int]:
    """Lengths whose mean is MEAN_TOKENS, whose p99 is six times and whose cap eight times that."""
    rng = np.random.default_rng(seed)
    draws = rng.lognormal(np.log(MEAN_TOKENS) - TAIL_SPREAD**2 / 2, TAIL_SPREAD, num)
    return np.clip(np.round(draws), 1, 8 * MEAN_TOKENS).astype(int).tolist()


def write_long_tail_recipe(folder: Path) -> None:
    """The quickstart with replayed lengths and rewards that never agree."""
    folder.mkdir()
    for name in ("checkpoint", "prompts.jsonl"):
        (folder / name).symlink_to(RECIPE / name)
    (folder / "task.py").write_text(TASK)
    (folder / "lengths.json").write_text(json.dumps(long_tail(1 << 16)))
    text = (
        (RECIPE / "run.yaml").read_text().replace("{override /algorithm: aipo}, _self_", "_self_")
    )
    (folder / "base.yaml").write_text(text)
    (folder / "run.yaml").write_text(
        "defaults: [base, _self_]\n"
        "data: {held_out: null}\n"
        "reward: {functions: [task]}\n"
        f"sampling: {{max_tokens: {8 * MEAN_TOKENS}, replay_lengths: lengths.json}}\n"
        "generator: {max_model_len: 256}\n"
    )


def run(recipe: Path, run_dir: Path, args: argparse.Namespace, seed: int, mode: str) -> Values:
    """Train once; the accuracy is NaN without held-out prompts."""
    options = [f"seed={seed}", f"num_steps={args.steps}", *QUIET, *MODES[mode]]
    found = train(recipe, run_dir, *options, *(QUICK if args.quick else ()))
    seconds = sum(found.steps_s)
    return {
        "seconds": seconds,
        "rollouts": found.summary["rollouts_trained"],
        "rollouts_per_s": found.summary["rollouts_trained"] / seconds,
        "accuracy": found.summary["accuracy_after"] or float("nan"),
        "both_busy_share": found.summary["both_busy_share"],
    }


def measure(workload: str, recipe: Path, folder: Path, args: argparse.Namespace) -> Rounds:
    """All modes, all seeds, in turns."""
    found: dict[str, list[Values]] = {mode: [] for mode in args.modes}
    for seed in range(args.seeds):
        for mode in args.modes:
            run_dir = folder / f"{workload}-{seed}-{mode.replace(', ', '-').replace(' ', '-')}"
            found[mode].append(run(recipe, run_dir, args, seed, mode))
    assert len({each["rollouts"] for rounds in found.values() for each in rounds}) == 1
    return found


def take_turns(
    run_once: Callable[[str, int], float], sync: str, quick: str, num_pairs: int
) -> list[float]:
    """How many times as fast `quick` is, pair by pair; `run_once` takes a mode and the pair's
    number, and returns seconds. Which of the two comes first alternates."""
    ratios = []
    for turn in range(num_pairs):
        pair = (sync, quick) if turn % 2 else (quick, sync)
        seconds = {mode: run_once(mode, turn) for mode in pair}
        ratios.append(seconds[sync] / seconds[quick])
    return ratios


def compare(
    bench: Bench, workload: str, recipe: Path, folder: Path, args: argparse.Namespace
) -> Rounds:
    """All figures of one workload."""
    found = measure(workload, recipe, folder, args)
    bench.add_medians({f"{workload}: {mode}": rounds for mode, rounds in found.items()})
    seconds = {mode: medians(rounds)["seconds"] for mode, rounds in found.items()}
    best = min((m for m in args.modes if m.startswith("sync")), key=seconds.__getitem__)
    quick = min((m for m in args.modes if m.startswith("async")), key=seconds.__getitem__)

    def run_once(mode: str, turn: int) -> float:
        run_dir = folder / f"{workload}-duel-{turn}-{mode.startswith('sync')}"
        return run(recipe, run_dir, args, args.seeds + turn, mode)["seconds"]

    bench.add_all({"best_sync": best, "best_async": quick}, workload)
    bench.add("ratio", seconds[best] / seconds[quick], workload)
    if duels := take_turns(run_once, best, quick, args.duels):
        bench.add(f"duel_ratio_{workload}", statistics.median(duels), workload, duels)
    return found


def main() -> None:
    bench = Bench(__doc__, {"duel_ratio_quickstart": "> 1.0", "duel_ratio_long_tail": ">= 1.3"})
    bench.option("--seeds", type=int, default=3, help="runs of each mode")
    bench.option("--steps", type=int, default=20, help="optimizer steps of each run")
    bench.option("--duels", type=int, default=3, help="pairs of the best of both kinds")
    bench.option("--workloads", nargs="*", default=WORKLOADS, choices=WORKLOADS)
    bench.option("--quick", action="store_true", help="one small run of either kind")
    args = bench.parse()
    args.modes = list(MODES)
    if args.quick:
        args.seeds, args.steps, args.duels, args.workloads = 1, 2, 0, ["long_tail"]
        args.modes = ["sync, 1 thread", "async, staleness 1"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_long_tail_recipe(folder / "recipe")
        recipes = dict(zip(WORKLOADS, (RECIPE, folder / "recipe"), strict=True))
        rounds = {
            workload: compare(bench, workload, recipes[workload], folder, args)
            for workload in args.workloads
        }
    bench.write(rounds)


if __name__ == "__main__":
    main()
