"""How well the planner's simulation predicts step times: against replays, and against live runs.

    python tools/bench_planner.py [--quick] --json FILE
    python tools/bench_planner.py --external [--rows TEXT ...] --json FILE

With --external nothing is run: forecasts of single settings are compared with public measurements
(`tools/planner_bench/measurements.yaml`): the ratio of each row, forecast speed over measured
speed, which is measured time over forecast time, and its error, max(ratio, 1 / ratio) - 1. Of
trainers, of generators and of whole steps: how many rows count, and between which times over the
forecast the middle half (`time_half`) and nine of ten (`time_most`) are. The rows that the law was
fitted on do not count, nor those on kinds of card that are not confirmed: they are shown apart.
Whole steps are those of other systems, with work that no key describes.

Costs are read off a run's spans, but for what its controller and messages take, which is chosen so
that the run's own step comes out.

Replay: the controller runs in real time with simulated executors that sleep for durations read off
a finished run, and is compared with the same on a virtual clock (`max_error_replay`). Live: costs
are read off one run of the quickstart recipe, then runs with other settings, which nothing was
fitted on, are compared with their simulation (`max_error_live`). Settings take turns within a
repeat, and each repeat begins with a calibration run of its own. Live errors compare medians over
repeats; of a replay, whose forecast is made from the very durations that it sleeps, the repeat with
the median error counts. --quick: one short calibration run with few rollouts, and its replay; its
errors say nothing.

Runs train with a learning rate of 0: the policy stays, so lengths and rewards of the calibration
run are those of the others. Use a quiet machine: whatever else computes shares its processors.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from harness import Bench
from hydra import compose, initialize_config_dir
from live_run import INLINE, RECIPE, train
from planner_bench import external

from llamarl.core.config import Config
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import forecast, run, simulate
from llamarl.planner.trace import (
    SETTLING_STEPS,
    Trace,
    fit_overhead,
    read_spans,
    read_trace,
    step_seconds,
)
from llamarl.recipe.composition import CONF_FOLDER, store_choices, to_config

COMMON = (
    "trainer.lr=0",
    "trainer.warmup_steps=0",
    "data.held_out=null",
    "checkpoint.export=false",
    "metrics.live=false",
    "metrics.trackers=[]",
)
QUICK = ("trainer.groups_per_step=4", INLINE)
GOALS = {
    "max_error_live": "<= 0.2",
    "max_error_replay": "<= 0.05",
    "max_error_fit": f"<= {external.GOAL_FIT}",
    "error_half": f"<= {external.GOAL_HALF}",
    "error_two_thirds": f"<= {external.GOAL_TWO_THIRDS}",
}
FITTED = "staleness 1"
LIVE = {  # name -> overrides, most processors used (0: all)
    FITTED: ((), 0),
    "staleness 0": (("staleness.max_staleness=0",), 0),
    "staleness 4": (("staleness.max_staleness=4",), 0),
    "groups of 4": (("sampling.rollouts_per_prompt=4",), 0),
    "two replicas": (("generator.num_replicas=2",), 0),
    "one core": ((), 1),
}
REPLAYED = (FITTED, "staleness 0", "two replicas")


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured seconds per step of one setting."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


def cores(most: int) -> list[int]:
    """The processors that a run with at most this many uses."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[: most or len(allowed)]


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """Of runs of the quickstart with these overrides, as long as the measured ones."""

    overrides: tuple[str, ...]
    num_steps: int
    architecture: Architecture

    def load(self, *more: str) -> Config:
        """The quickstart recipe with these overrides."""
        store_choices()
        path = f"hydra.searchpath=[file://{CONF_FOLDER}]"
        with initialize_config_dir(version_base="1.3", config_dir=str(RECIPE)):
            return to_config(compose("run", [path, *self.overrides, *more]))

    def configure(self, trace: Trace, name: str) -> Config:
        """The config of a setting, with the trace's prompts."""
        config = self.load(*LIVE[name][0])
        return replace(config, plan=replace(config.plan, prompt_tokens=trace.prompt_tokens))

    def predict(self, trace: Trace, costs: Costs, name: str) -> float:
        """The simulated mean step of a setting, over the same steps as are measured."""
        config = self.configure(trace, name)
        step = simulate(
            config,
            self.architecture,
            costs,
            workload=trace.workload(config),
            num_steps=self.num_steps,
            num_skipped=SETTLING_STEPS,
        )
        return step.step_s

    def replay(self, trace: Trace, name: str) -> Comparison:
        """Forecast and replay, all executors in this process."""
        config, costs = self.configure(trace, name), costs_on(trace, name)
        workload = trace.workload(config)
        timeline = asyncio.run(run(config, costs, self.architecture, workload, self.num_steps))
        measured_s = forecast(timeline, SETTLING_STEPS).step_s
        return Comparison(self.predict(trace, costs, name), measured_s)


def costs_on(trace: Trace, name: str) -> Costs:
    """The run's costs on the processors of a setting."""
    return replace(trace.costs, num_cores=len(cores(LIVE[name][1])))


def compare_external(bench: Bench, wanted: Sequence[str]) -> None:
    """The rows of the table with one of these texts in their names, all of them without a text, and
    how far off they are."""
    rows = external.read_measurements()
    rows = [row for row in rows if not wanted or any(text in row.name for text in wanted)]
    ratios = external.compare(rows)
    for row in rows:
        values = {"ratio": ratios[row.name], "error": external.error(ratios[row.name])}
        bench.add_all(values, row.name + " (fit)" * row.is_fit + " (partial)" * row.is_partial)
    fitted = (external.error(ratios[row.name]) for row in rows if row.is_fit)
    bench.add("max_error_fit", max(fitted, default=math.nan))
    for kind, of_kind in external.counted(rows).items():
        if found := external.on_confirmed(of_kind, ratios):
            spread = external.spread_of(found)
            bench.add_all({"rows": spread.num_rows}, kind)
            bench.add_all({"time_half": [*spread.half], "time_most": [*spread.most]}, kind)
        if kind != "step":
            if sizes := sorted(map(external.error, found)):
                bench.add("error_half", sizes[len(sizes) // 2], kind)
                bench.add("error_two_thirds", sizes[2 * len(sizes) // 3], kind)
            for card in sorted(
                {row.gpu for row in of_kind} - {*external.confirmed(of_kind, ratios)}
            ):
                times = [ratios[row.name] for row in of_kind if row.gpu == card]
                case = f"{kind}, {card}: not confirmed"
                bench.add_all(
                    {"rows": len(times), "time_half": [*external.spread_of(times).half]}, case
                )
    bench.write(name="planner_external")


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--external", action="store_true", help="compare with public measurements")
    bench.option(
        "--rows", nargs="*", default=[], help="of these, those with one of these texts in the name"
    )
    bench.option("--repeats", type=int, default=3, help="runs of each setting")
    bench.option("--steps", type=int, default=10, help="optimizer steps of each run")
    bench.option("--settings", nargs="*", default=list(LIVE), help="live settings")
    bench.option("--quick", action="store_true", help="one short run, and its replay")
    bench.option("--runs", type=Path, help="keep the run folders here, use those there")
    args = bench.parse()
    if args.external:
        return compare_external(bench, args.rows)
    overrides, replayed = COMMON, REPLAYED
    if args.quick:
        args.repeats, args.steps, args.settings = 1, SETTLING_STEPS + 2, [FITTED]
        overrides, replayed = (*COMMON, *QUICK), (FITTED,)
    forecasts = Forecasts(
        overrides=overrides,
        num_steps=args.steps,
        architecture=read_architecture(RECIPE / "checkpoint"),
    )
    found: dict[str, list[Comparison]] = defaultdict(list)

    def note(key: str, each: Comparison) -> None:
        found[key].append(each)
        print(f"{key:<36} {each}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        for repeat in range(args.repeats):
            for name in args.settings:
                run_dir, (options, most) = folder / f"{repeat}-{name.replace(' ', '-')}", LIVE[name]
                if not (run_dir / "summary.json").exists():
                    begin = partial(os.sched_setaffinity, 0, cores(most))
                    options = (f"num_steps={args.steps}", *overrides, *options)
                    train(RECIPE, run_dir, *options, begin=begin)
                if name == FITTED:
                    size = forecasts.load().sampling.rollouts_per_prompt
                    trace = read_trace(run_dir, size, num_cores=len(cores(0)))
                    config = forecasts.configure(trace, FITTED)
                    trace = fit_overhead(trace, config, forecasts.architecture)
                predicted_s = forecasts.predict(trace, costs_on(trace, name), name)
                note(
                    f"live {name}",
                    Comparison(predicted_s, step_seconds(read_spans(run_dir / "spans"))),
                )
            for name in replayed:
                note(f"replay {name}", forecasts.replay(trace, name))
    errors: dict[str, float] = defaultdict(float)
    for key, repeats in found.items():
        is_replay = key.startswith("replay")
        each = paired(repeats) if is_replay else middle(repeats)
        bench.add_all({**vars(each), "error": each.error}, key)
        if key != f"live {FITTED}":
            kind = "replay" if is_replay else "live"
            errors[kind] = max(errors[kind], each.error)
    for kind, error in errors.items():
        bench.add(f"max_error_{kind}", error)
    bench.write({key: [vars(each) for each in repeats] for key, repeats in found.items()})


def paired(repeats: list[Comparison]) -> Comparison:
    """The repeat whose ratio is the median: each has a forecast from its own durations."""
    return sorted(repeats, key=lambda each: each.predicted_s / each.measured_s)[len(repeats) // 2]


def middle(repeats: list[Comparison]) -> Comparison:
    """Medians over repeats, of forecasts and of measurements."""
    return Comparison(
        median(each.predicted_s for each in repeats), median(each.measured_s for each in repeats)
    )


if __name__ == "__main__":
    main()
