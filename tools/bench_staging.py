"""What a publish costs a running training, by where a version waits and who commits when.

    python tools/bench_staging.py [--json FILE] [--quick]

The long-tailed workload of bench_async.py (lengths replayed, staleness 1) with two generator
replicas of four rollouts at once, real processes and a model of 95 MB in float32, which is to be
published after every step. All forms take turns in a round; ratios are to the first form of the
same round, then medians over rounds. About 4 minutes a round.

    blocking         decoding stands still from before a replica prepares a version until it has
                     committed it; its rollouts go on afterwards. Only this program has it
    bucket           `weights.staging=bucket`, the model in 16 buckets: a replica decodes while the
                     first is written and stands still for the other fifteen
    double_buffer    written beside the active weights; on the CPU a commit swaps the two
    host             written into host memory, copied over at the commit: AsyncFlow's delayed update

    staggered        as it is built: the trainer feeds the first replica of a host, which commits
                     and feeds the next one. AsyncFlow's "sub-step asynchrony"
    together         all commit once the last replica has verified the version; the trainer feeds
                     each of them. Only this program has it

`staging_bench/variants.py` has the forms that no setting has. The last form is as it is built, with
staleness 2: what one more version of age buys.
`staging_bench/exposure.py` says what each column means. Log-prob checks are off, because their
rollouts follow each commit at once and would hide whether a replica had waited for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from staging_bench.exposure import measure, read_spans
from staging_bench.workload import FORMS, Form, Workload, make_workload

FIRST_VERSION = 2  # the steps before it fill the pipeline
BASE = FORMS[0].name
Figures = dict[str, float]
COLUMNS = {  # figure: heading, how it is shown, how many of the unit one of the figure is
    "step_s": ("step, s", ".2f", 1),
    "step_s_ratio": ("ratio", ".2f", 1),
    "tokens_per_s": ("tokens/s", ".0f", 1),
    "idle_share": ("idle, %", ".0f", 100),
    "publish_s": ("publish, ms", ".0f", 1000),
    "interrupted_s": ("interrupted", ".1f", 1000),
    "starved_s": ("starved", ".0f", 1000),
    "exposed_s": ("exposed", ".0f", 1000),
    "exposed_s_ratio": ("ratio", ".2f", 1),
    "all_stopped_s": ("both stopped", ".0f", 1000),
    "all_stopped_s_ratio": ("ratio", ".2f", 1),
    "trainer_s": ("trainer", ".1f", 1000),
    "lead_s": ("lead", ".0f", 1000),
    "lead_tokens": ("lead tokens", ".0f", 1),
    "staleness_mean": ("staleness", ".2f", 1),
    "staleness_max": ("most", ".0f", 1),
}


def run(workload: Workload, form: Form, run_dir: Path, seed: int) -> Figures:
    """Train once; the figures of the versions from FIRST_VERSION on. A step's seconds are a median:
    what else the machine does disturbs single steps."""
    workload.run(form, run_dir, seed)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > FIRST_VERSION]
    seconds = sum(step["time/step_s"] for step in steps)
    tokens = [step["time/step_s"] * step["tokens/per_s"] for step in steps]
    ages = [step["staleness/mean"] * num for step, num in zip(steps, tokens, strict=True)]
    exposure = measure(read_spans(run_dir / "spans"), FIRST_VERSION)
    found = {
        "step_s": statistics.median(step["time/step_s"] for step in steps),
        "tokens_per_s": sum(tokens) / seconds,
        **asdict(exposure),
        "exposed_s": exposure.exposed_s,
        "staleness_mean": sum(ages) / sum(tokens),
        "staleness_max": max(step["staleness/max"] for step in steps),
    }
    assert found["staleness_max"] <= form.max_staleness, (form, found)
    assert found["early_share"] == (form.commits == "staggered"), (form, found)
    return found


def bench(workload: Workload, folder: Path, num_rounds: int) -> dict[str, list[Figures]]:
    """All forms in turns, by form and round."""
    found: dict[str, list[Figures]] = {form.name: [] for form in FORMS}
    for number in range(num_rounds):
        print_headings(f"round {number}")
        for form in FORMS:
            run_dir = folder / f"{number}-{form.name.replace(', ', '-').replace(' ', '-')}"
            found[form.name].append(run(workload, form, run_dir, seed=number))
            print_row(form.name, found[form.name][-1])
    for each in found.values():
        for number, figures in enumerate(each):
            for key in ("step_s", "exposed_s", "all_stopped_s"):
                figures[f"{key}_ratio"] = figures[key] / found[BASE][number][key]
    return found


def print_row(name: str, figures: Figures) -> None:
    """One line of the table; times without a unit are milliseconds."""
    cells = (
        f"{figures[key] * scale:{max(len(heading), 6)}{form}}"
        if key in figures
        else " " * max(len(heading), 6)
        for key, (heading, form, scale) in COLUMNS.items()
    )
    print(f"{name:38}{'  '.join(cells)}", flush=True)


def print_headings(title: str) -> None:
    print(f"\n{title:38}{'  '.join(f'{heading:>6}' for heading, *_ in COLUMNS.values())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each form")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of each run")
    parser.add_argument("--layers", type=int, default=8, help="of 12 MB each")
    parser.add_argument("--quick", action="store_true", help="one short round of one layer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.quick:
        # A layer, not none: or one turn of another process amid a commit is as long as a publish.
        args.rounds, args.steps, args.layers = 1, 6, 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workload = make_workload(folder, num_layers=args.layers, num_steps=args.steps)
        megabytes = workload.model_bytes / 1e6
        print(f"{megabytes:.0f} MB, {args.steps} steps, {args.rounds} rounds")
        found = bench(workload, folder, args.rounds)
    medians = {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    print_headings("medians")
    for name, figures in medians.items():
        print_row(name, figures)
    if args.json:
        results = {"megabytes": megabytes, "medians": medians, "rounds": found}
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
