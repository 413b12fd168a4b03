"""What streams are worth in real runs: parts of a step, order by length, asynchrony.

    python tools/bench_streams.py --seeds 3 --steps 8 --json FILE

The quickstart's model and 128 of its prompts, which come back every second step, with replayed
lengths of two shapes: `tail`, that of bench_async.py (log-normal, 99th percentile six times the
mean), and `20k`, long reasoning with a cap of 20,000 tokens, at a hundredth of the size
(log-normal, median 3,000, spread 1, so 3 % reach the cap). A spread of 0.4 is chance, the rest
belongs to the prompt. Every rollout is trained; all runs of a workload train equal rollouts.

`parts`: two replicas beside one trainer rank, S = 0 and S = 1: whole batches, fixed parts of a
quarter of a step, dynamic parts; and at S = 0 groups carried over. Runs take turns in a seed. A
step's time is the median over the steps of all seeds but the first two of each run.

`orders`: that of admission, by the lengths of earlier rollouts of a prompt, and by an oracle. At
S = 0 they take turns in one run, step by step (streams_bench/turns.py), since two runs differ by
more than an order gains, with two trainer ranks, so that both cores train, and 32 slots, so that a
replica writes a step in eight waves, as where the KV cache limits the batch. At S = 1, where a step
begins in the one before, each order has its own run. `share_of_oracle`: of the seconds that the
oracle saves, what the ranker does; `decode_steps` of a training step, on the replica that makes
most, by order: what an order changes, while seconds depend on what shares the processors too.

`asynchrony`: the best of `ASYNC` and of the runs above with S = 1, over the best of `SYNC` and of
those with S = 0 that carry nothing over. These two then run in pairs, one directly after the other,
and `async_vs_sync` is the median of the pairs' ratios. `least_step_s` is the shortest step that any
schedule of the asynchronous run's work could reach on these processors: its busiest process's
seconds of processor, or all processes' over the number of cores (streams_bench/processors.py).

`--quick`: one small run, in which orders take turns, stands for all, whose options are composed but
not run; so its figures say nothing.
`--simulate` adds simulated runs of StreamRL's size (streams_bench/simulated.py), in 3 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import bench_async
import numpy as np
from harness import Bench
from live_run import INLINE, PROGRAM, QUIET, LiveRun, command, environment
from staging_bench.exposure import measure, read_spans
from streams_bench.decode_steps import decode_steps
from streams_bench.processors import least_step_s, run_steps
from streams_bench.simulated import CASES, bands, gains
from streams_bench.turns import ORDERS

from llamarl.recipe.composition import compose, to_config

ROLLOUTS = 8  # per prompt
NUM_SKIPPED = 2  # first steps of a run
RANKED = "S=1, dynamic"  # also run in each order
CARRIED = "S=0, carried over"
NUM_PROMPTS, NUM_EPOCHS = 128, 64
IN_TURNS = ("-m", "streams_bench.turns")
QUICK_TOKENS = 8  # of a rollout at most
# Of log-lengths, among the rollouts of a prompt: earlier ones then find 0.85 to 0.91 of the longest
# fifth of the prompts; StreamRL publishes 0.87.
NOISE = 0.4

TWO = ["generator.num_replicas=2"]
RANKS = bench_async.RANKS
BATCH = ["trainer.parts=batch"]
SYNC = {
    "sync, 2 threads": ["staleness.max_staleness=0", "cluster.threads_per_process=2"],
    "sync, 2 ranks, 2 replicas": ["staleness.max_staleness=0", *RANKS, *TWO],
}
SYNC |= {f"{name}, batch": [*options, *BATCH] for name, options in SYNC.items()}
ASYNC = {
    "async": ["staleness.max_staleness=1"],
    "async, 64 slots": ["staleness.max_staleness=1", "generator.max_num_seqs=64"],
    "async, staleness 2": ["staleness.max_staleness=2"],
    "async, 2 ranks": ["staleness.max_staleness=1", *RANKS],
    "async, 2 ranks, 64 slots": ["staleness.max_staleness=1", *RANKS, "generator.max_num_seqs=64"],
}
WAVES = [*TWO, *RANKS, "generator.max_num_seqs=32"]
TURNS = {  # runs in which the orders take turns
    f"S=0, {name}": ["staleness.max_staleness=0", *WAVES, *options]
    for name, options in (("batch", BATCH), ("dynamic", []))
}


def part_modes(groups_per_step: int) -> dict[str, list[str]]:
    """The runs that differ in their parts, and those that carry over."""
    fixed = ["trainer.parts=fixed", f"trainer.groups_per_part={groups_per_step // 4}"]
    parts = {"batch": BATCH, "fixed": fixed, "dynamic": ["trainer.parts=dynamic"]}
    modes: dict[str, list[str]] = {}
    for s, (name, options) in product((0, 1), parts.items()):
        mode = f"S={s}, {name}"
        modes[mode] = [f"staleness.max_staleness={s}", *TWO, *options]
    carried = [f"staleness.carry_over_groups={groups_per_step // 8}", "staleness.late=mask"]
    return modes | {CARRIED: [*modes["S=0, dynamic"], *carried]}


def modes_of(figures: Sequence[str], groups_per_step: int) -> dict[str, list[str]]:
    """The runs that these figures need, but those in which orders take turns."""
    parts = part_modes(groups_per_step)
    modes = dict(parts) if "parts" in figures else {}
    if "orders" in figures:
        modes |= {RANKED: parts[RANKED]}
        modes |= {f"{RANKED}, {o}": [*parts[RANKED], f"dispatch.ranker={o}"] for o in ORDERS[1:]}
    return modes | SYNC | ASYNC if "asynchrony" in figures else modes


@dataclass(frozen=True)
class Shape:
    """Lengths exp(N(ln median, spread^2)), cut at `most`."""

    median: float
    spread: float
    most: int

    def lengths(self, num_prompts: int, num_epochs: int) -> list[int]:
        """Of every rollout, epoch after epoch: part of the spread belongs to the prompt."""
        rng = np.random.default_rng(0)
        size = num_epochs, num_prompts, ROLLOUTS
        of_prompt = rng.normal(0, math.sqrt(self.spread**2 - NOISE**2), (1, num_prompts, 1))
        draws = self.median * np.exp(of_prompt + rng.normal(0, NOISE, size))
        return np.clip(np.round(draws), 1, self.most).astype(int).ravel().tolist()


MEAN = bench_async.MEAN_TOKENS
SPREAD = bench_async.TAIL_SPREAD
WORKLOADS = {
    "tail": Shape(MEAN / math.exp(SPREAD**2 / 2), SPREAD, 8 * MEAN),
    "20k": Shape(30, 1.0, 200),
}


@dataclass
class Runs:
    """What all runs of a workload took."""

    recipe: Path
    most_tokens: int
    folder: Path
    args: argparse.Namespace
    step_s: dict[str, list[float]] = field(default_factory=dict)
    """By mode, of all seeds."""
    least_s: dict[str, list[float]] = field(default_factory=dict)
    """By mode, of each seed."""
    decode_steps: dict[str, list[int]] = field(default_factory=dict)
    """By mode with orders in turn, of all seeds."""
    last: dict[str, LiveRun] = field(default_factory=dict)
    """By mode, of the last seed."""
    quick: tuple[LiveRun, float] | None = None
    """With --quick: what stands for all runs."""

    def train(
        self,
        name: str,
        options: list[str],
        seed: int,
        num_steps: int,
        program: Sequence[str] = PROGRAM,
    ) -> tuple[LiveRun, float]:
        """Train once: the run, and the least that the seconds of a step could be."""
        run_dir = self.folder / "-".join(re.findall(r"\w+", f"{name} {seed}"))
        overrides = (
            *(f"seed={seed}", f"num_steps={num_steps}", *QUIET, "checkpoint.every_steps=0"),
            *(f"trainer.groups_per_step={self.args.groups}", "data.shuffle=false"),
            *(f"sampling.max_tokens={self.most_tokens}", *options),
        )
        if self.quick is not None:
            to_config(compose(self.recipe, overrides))
            return self.quick
        if self.args.quick:
            program = IN_TURNS
            overrides += (INLINE, f"num_steps={self.num_turns}", "trainer.num_ranks=1")
        words = command(self.recipe, run_dir, *overrides, program=program)
        metrics = run_dir / "metrics.jsonl"
        least_s = least_step_s(run_steps(words, environment(), metrics, NUM_SKIPPED))
        found = LiveRun(run_dir)
        print(
            f"  {name:<40} seed {seed} {statistics.median(found.steps_s[NUM_SKIPPED:]):6.2f} s a "
            f"step, at least {least_s:.2f}, both busy {found.summary['both_busy_share']:.0%}",
            flush=True,
        )
        if self.args.quick:
            self.quick = found, least_s
        return found, least_s

    def run(self, mode: str, options: list[str], seed: int) -> None:
        """Train once in this mode."""
        found, least_s = self.train(mode, options, seed, self.args.steps + NUM_SKIPPED)
        self.last[mode] = found
        self.step_s.setdefault(mode, []).extend(found.steps_s[NUM_SKIPPED:])
        self.least_s.setdefault(mode, []).append(least_s)

    def run_in_turns(self, mode: str, options: list[str], seed: int) -> None:
        """Train once with the orders in turn; the first rounds have nothing to rank by."""
        name = f"{mode}, in turns"
        self.last[name], _ = self.train(name, options, seed, self.num_turns, IN_TURNS)
        seconds = self.last[name].steps_s
        counts = decode_steps(read_spans(self.last[name].run_dir / "spans"))
        num_skipped = NUM_SKIPPED * len(ORDERS)
        seconds, counts = seconds[num_skipped:], counts[num_skipped:]
        for index, order in enumerate(ORDERS):
            some = seconds[index :: len(ORDERS)]  # their prompts are those of step 1, 2, 1, ...
            pairs = [(one + two) / 2 for one, two in zip(some[::2], some[1::2], strict=True)]
            self.step_s.setdefault(f"{name}, {order}", []).extend(pairs)
            self.decode_steps.setdefault(f"{name}, {order}", []).extend(
                counts[index :: len(ORDERS)]
            )

    @property
    def num_turns(self) -> int:
        """Steps of a run in which the orders take turns."""
        return len(ORDERS) * (self.args.rounds + NUM_SKIPPED)

    def seconds_of(self, mode: str, turn: int) -> float:
        """A step of one more run in this mode, with a seed of its own."""
        options = {**part_modes(self.args.groups), **SYNC, **ASYNC}[mode]
        num_steps, seed = self.args.steps + NUM_SKIPPED, self.args.seeds + turn
        found, least_s = self.train(f"{mode}, pair", options, seed, num_steps)
        self.least_s[mode].append(least_s)
        return statistics.median(found.steps_s[NUM_SKIPPED:])

    def median_s(self, mode: str) -> float:
        return statistics.median(self.step_s[mode])

    def best(self, *beginnings: str) -> str:
        """The fastest of the runs whose names begin so, and that carry nothing over."""
        some = [mode for mode in self.step_s if mode.startswith(beginnings)]
        most = {*part_modes(self.args.groups), *SYNC, *ASYNC} - {CARRIED}
        return min((mode for mode in some if mode in most), key=self.median_s)

    def metric(self, mode: str, tag: str) -> float:
        """The sum of a tag over a run's steps."""
        return sum(float(step.get(tag, 0.0)) for step in self.last[mode].steps)


def parts_of(bench: Bench, shape: str, runs: Runs) -> None:
    """What parts of a step are worth, and what a publish costs."""
    for s in (0, 1):
        case = f"{shape}, S={s}"
        batch_s, fixed_s, dynamic_s = (
            runs.median_s(f"S={s}, {parts}") for parts in ("batch", "fixed", "dynamic")
        )
        bench.add("dynamic_vs_batch", batch_s / dynamic_s, case)
        bench.add("dynamic_vs_fixed", fixed_s / dynamic_s, case)
        exposure = measure(read_spans(runs.last[f"S={s}, dynamic"].run_dir / "spans"), NUM_SKIPPED)
        for name in ("trainer_s", "interrupted_s", "starved_s", "publish_s"):
            bench.add(name, getattr(exposure, name), case)
    bench.add("carried_vs_dynamic", runs.median_s("S=0, dynamic") / runs.median_s(CARRIED), shape)
    masked, trained = (runs.metric(CARRIED, f"tokens/{kind}") for kind in ("masked", "trained"))
    bench.add("carried_masked_share", masked / (masked + trained), shape)


def orders_of(bench: Bench, shape: str, runs: Runs) -> None:
    """What the order of rollouts is worth, by run."""
    modes = {
        f"{mode}, in turns": [f"{mode}, in turns, {order}" for order in ORDERS] for mode in TURNS
    }
    modes[RANKED] = [RANKED, *(f"{RANKED}, {order}" for order in ORDERS[1:])]
    for mode, names in modes.items():
        case = f"{shape}, {mode}"
        fifo_s, ranked_s, oracle_s = map(runs.median_s, names)
        bench.add("ranked_vs_fifo", fifo_s / ranked_s, case)
        bench.add("oracle_vs_fifo", fifo_s / oracle_s, case)
        saved_s = fifo_s - oracle_s
        share = (fifo_s - ranked_s) / saved_s if saved_s > 0 else None
        bench.add("share_of_oracle", share, case)
        if mode != RANKED:
            steps = [statistics.mean(runs.decode_steps[name]) for name in names]
            fifo, ranked, oracle = steps
            bench.add("decode_steps", steps, case)
            saved = fifo - oracle
            share = (fifo - ranked) / saved if saved > 0 else None
            bench.add("share_of_oracle_decode_steps", share, case)


def asynchrony_of(bench: Bench, shape: str, runs: Runs) -> None:
    """What asynchrony is worth, and what it could be."""
    sync, quick = runs.best("sync", "S=0"), runs.best("async", "S=1")
    duels = bench_async.take_turns(runs.seconds_of, sync, quick, runs.args.duels)
    pairs = statistics.median(duels)
    least_s = statistics.median(runs.least_s[quick])
    share = least_s / runs.median_s(quick)
    bench.add_all({"best_sync": sync, "best_async": quick}, shape)
    bench.add("medians_async_vs_sync", runs.median_s(sync) / runs.median_s(quick), shape)
    bench.add("async_vs_sync", pairs, shape, duels)
    bench.add_all({"least_step_s": least_s, "share_of_least": share}, shape)
    bench.add("least_vs_sync", pairs / share, shape)
    for mode in ASYNC:
        bench.add("both_busy_share", runs.last[mode].summary["both_busy_share"], f"{shape}, {mode}")


FIGURES = {"parts": parts_of, "orders": orders_of, "asynchrony": asynchrony_of}
GOALS = {
    "ranked_vs_fifo": ">= 1.05",
    "share_of_oracle": ">= 0.8",
    "share_of_oracle_decode_steps": ">= 0.8",
    "share_of_least": ">= 0.9",
    "both_busy_share": ">= 0.75",
}


def measure_workload(bench: Bench, shape: str, folder: Path, args: argparse.Namespace) -> Runs:
    """All runs and figures of one workload."""
    lengths = WORKLOADS[shape]
    if args.quick:
        lengths = dataclasses.replace(lengths, most=QUICK_TOKENS)
    runs = Runs(write_recipe(folder, shape, lengths), lengths.most, folder / shape, args)
    for seed in range(args.seeds):
        for mode, options in modes_of(args.figures, args.groups).items():
            runs.run(mode, options, seed)
        for mode, options in TURNS.items() if "orders" in args.figures else ():
            runs.run_in_turns(mode, options, seed)
    for mode in runs.step_s:
        bench.add("step_s", runs.median_s(mode), f"{shape}, {mode}", runs.step_s[mode])
    for name in args.figures:
        FIGURES[name](bench, shape, runs)
    return runs


def write_recipe(folder: Path, name: str, shape: Shape) -> Path:
    """bench_async's recipe with lengths of this shape, and few prompts, which come back."""
    recipe = folder / f"recipe-{name}"
    bench_async.write_long_tail_recipe(recipe)
    (recipe / "lengths.json").write_text(json.dumps(shape.lengths(NUM_PROMPTS, NUM_EPOCHS)))
    prompts = (recipe / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (recipe / "prompts.jsonl").unlink()
    (recipe / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    return recipe


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--seeds", type=int, default=3, help="runs of each mode")
    bench.option("--steps", type=int, default=8, help="steps of a run that count")
    bench.option("--rounds", type=int, default=20, help="steps of each order in turn")
    bench.option("--duels", type=int, default=3, help="pairs of the best of both kinds")
    bench.option("--groups", type=int, default=64, help="groups of a step")
    bench.option("--workloads", nargs="*", default=[*WORKLOADS], choices=[*WORKLOADS])
    bench.option("--figures", nargs="*", default=[*FIGURES], choices=[*FIGURES])
    bench.option("--quick", action="store_true", help="one small run stands for all")
    bench.option("--simulate", action="store_true", help="the simulated run too")
    args = bench.parse()
    if args.quick:
        args.seeds, args.steps, args.rounds, args.duels = 1, 2, 2, 1
        args.groups, args.workloads = 8, ["tail"]
    args.rounds += args.rounds % 2  # prompts come back every second step
    rounds: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for shape in args.workloads:
            runs = measure_workload(bench, shape, Path(temporary), args)
            rounds[shape] = runs.step_s
    if args.simulate:
        found = [gains(case) for case in CASES]
        pairs = zip(CASES, found, strict=True)
        rounds["simulated_cases"] = [dataclasses.asdict(case) | each for case, each in pairs]
        for name, band in bands(found).items():
            bench.add(name, None, "simulated", band)
    bench.write(rounds)


if __name__ == "__main__":
    main()
