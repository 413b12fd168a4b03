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
staleness 2: what one more version of age buys. --quick: the first form alone, once, with one layer.
`staging_bench/exposure.py` says what each column means. Log-prob checks are off, because their
rollouts follow each commit at once and would hide whether a replica had waited for it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness import Bench, Values
from live_run import INLINE
from staging_bench.exposure import measure, read_spans
from staging_bench.workload import FORMS, Form, Workload, make_workload

FIRST_VERSION = 2  # the steps before it fill the pipeline
BASE = FORMS[0].name


def run(workload: Workload, form: Form, run_dir: Path, seed: int) -> Values:
    """Train once; the figures of the versions from FIRST_VERSION on. A step's seconds are a median:
    what else the machine does disturbs single steps."""
    steps = workload.run(form, run_dir, seed).steps
    steps = [step for step in steps if step["step"] > FIRST_VERSION]
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


def measure_forms(
    workload: Workload, folder: Path, forms: Sequence[Form], num_rounds: int
) -> dict[str, list[Values]]:
    """These forms in turns, by form and round."""
    found: dict[str, list[Values]] = {form.name: [] for form in forms}
    for number in range(num_rounds):
        for form in forms:
            run_dir = folder / f"{number}-{form.name.replace(', ', '-').replace(' ', '-')}"
            found[form.name].append(run(workload, form, run_dir, seed=number))
            print(f"round {number}  {form.name:38} {found[form.name][-1]}", flush=True)
    for each in found.values():
        for number, figures in enumerate(each):
            for key in ("step_s", "exposed_s", "all_stopped_s"):
                ratio = f"{key.removesuffix('_s')}_ratio"
                figures[ratio] = figures[key] / found[BASE][number][key]
    return found


def main() -> None:
    bench = Bench(__doc__)
    bench.option("--rounds", type=int, default=3, help="runs of each form")
    bench.option("--steps", type=int, default=9, help="optimizer steps of each run")
    bench.option("--layers", type=int, default=8, help="of 12 MB each")
    bench.option("--quick", action="store_true", help="the first form once, one layer")
    args = bench.parse()
    forms, more = FORMS, ()
    if args.quick:
        # A layer, not none: or one turn of another process amid a commit is as long as a publish.
        args.rounds, args.steps, args.layers = 1, 6, 1
        forms, more = FORMS[:1], (INLINE,)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workload = make_workload(folder, *more, num_layers=args.layers, num_steps=args.steps)
        bench.add("model_bytes", workload.model_bytes)
        found = measure_forms(workload, folder, forms, args.rounds)
    bench.add_medians(found)
    bench.write(found)


if __name__ == "__main__":
    main()
