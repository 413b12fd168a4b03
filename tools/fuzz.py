"""Damages what a run reads, file by file and key by key, and judges how the run ends.

    python tools/fuzz.py --seed 0 --cases 1200
    python tools/fuzz.py --seed 0 --case 417       # one again, with all it printed

Every file (recipe, prompts, checkpoint, tokenizer, safetensors, task.py; of a resumed run also the
sharded checkpoint, its state and manifest, the run files) and every config key is given damage that
`llamarl train` (for some, `llamarl view`) must name in one line, pass over with a warning, or
survive: a bare traceback, a minute without an end, gigabytes of memory and damaged weights that
train in silence are findings, and end this with exit code 1. Most cases go as far as the weights
are loaded, some of them through a whole inline run of three steps.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import get_args

from fuzzing.cases import KEYS, SETTINGS, make_case
from fuzzing.children import CallResult, make_inputs, try_all
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from llamarl.recipe.composition import CONF_FOLDER, store_choices, to_config

IMPORTS = ("llamarl.cli.main", "torch._dynamo", "transformers", "safetensors.torch")
VERDICTS = ("refused", "passed over", "accepted", "ended")


def main(arguments: list[str] | None = None) -> int:
    """Try the cases; 1 if something was found, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--case", type=int, help="only this one, shown whole")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--runs", type=float, default=0.1, help="share of whole runs")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="no new case after this")
    options = parser.parse_args(arguments)
    _import()
    numbers = range(options.cases) if options.case is None else [options.case]
    begin = time.monotonic()
    outcomes: list[CallResult] = []
    with tempfile.TemporaryDirectory(prefix="llamarl-fuzz-") as name:
        sound = Path(name, "sound")
        make_inputs(sound)
        composed = _compose(sound / "recipe")
        config = to_config(composed)
        make = partial(make_case, options.seed, config=config, run_share=options.runs)
        makes = (partial(make, n) for n in numbers if time.monotonic() < begin + options.limit_s)
        for outcome in try_all(makes, sound, composed, Path(name), options.jobs):
            outcomes.append(outcome)
            if outcome.finding:
                sys.stdout.write(
                    f"case {outcome.case.number}: {outcome.case.what}: {outcome.finding}\n"
                )
                sys.stdout.flush()
    if options.case is None:
        _show(outcomes, time.monotonic() - begin)
    else:
        sys.stdout.write(f"{outcomes[0].case}\n{outcomes[0].verdict}\n{outcomes[0].output}")
    return int(any(outcome.finding for outcome in outcomes))


def _import() -> None:
    """What every case needs, so that its fork has it."""
    from llamarl.controller.starter import Spec

    for name in (*IMPORTS, *(spec.executor.split(":")[0] for spec in get_args(Spec))):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.freeze()


def _compose(recipe: Path) -> DictConfig:
    """The sound recipe with the settings of all cases."""
    store_choices()
    with initialize_config_dir(version_base="1.3", config_dir=str(recipe)):
        overrides = [f"hydra.searchpath=[file://{CONF_FOLDER}]", *SETTINGS, "run_dir=new"]
        return compose("run", overrides)


def _show(outcomes: list[CallResult], seconds: float) -> None:
    """A table of targets and verdicts, and what was found."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        what = outcome.case.what
        target = what.split(" (")[0] if "/" in what.split("=")[0] else KEYS
        table[target][outcome.verdict] += 1
        table["all"][outcome.verdict] += 1
    verdicts = [*VERDICTS, *sorted(table["all"].keys() - set(VERDICTS))]
    width = max(map(len, table))
    sys.stdout.write(f"{'':{width}}  {'  '.join(verdicts)}\n")
    for target in sorted(table, key=lambda name: (name == "all", name)):
        counts = "  ".join(f"{table[target][verdict]:{len(verdict)}}" for verdict in verdicts)
        sys.stdout.write(f"{target:{width}}  {counts}\n")
    slowest = max((outcome.seconds for outcome in outcomes), default=0)
    findings = sum(bool(outcome.finding) for outcome in outcomes)
    sys.stdout.write(
        f"{len(outcomes)} cases, {findings} findings, slowest {slowest:.1f} s, "
        f"{seconds:.0f} s in all\n"
    )


if __name__ == "__main__":
    sys.exit(main())
