"""How long a start takes with many prompts, and what memory they take.

    python tools/bench_prompts.py [--json FILE] [--prompts 1000000]

A file of short questions is written, and read as a run reads it: the first time, when all cores
tokenise it into a new cache, and in a process of its own once more. Then prompts are drawn in the
order of a run. `read_s` is until the prompts are ready; `resident_bytes` is the memory of the
process that has read them and drawn 100,000, `own_bytes` what of it no file stands behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, Bench, Values

NUM_DRAWN = 100_000
RECIPE = ROOT / "recipes" / "quickstart"


def write_prompts(path: Path, count: int) -> None:
    """Sums, each another one."""
    with path.open("w") as file:
        for i in range(count):
            row = {"question": f"What is {i % 997}+{i // 997}?", "answer": str(i % 997 + i // 997)}
            file.write(json.dumps(row) + "\n")


def read(path: str) -> Values:
    """In this process."""
    from llamarl.recipe.composition import compose, to_config
    from llamarl.recipe.inputs import make_prompts, read_inputs

    overrides = [f"data.prompts='{path}'", "data.held_out=null"]
    config = to_config(compose(RECIPE, overrides))
    start_s = time.perf_counter()
    inputs = read_inputs(config)
    read_s = time.perf_counter() - start_s
    prompts = make_prompts(config, inputs, {})
    start_s = time.perf_counter()
    for _ in range(NUM_DRAWN):
        next(prompts)
    draw_us = (time.perf_counter() - start_s) / NUM_DRAWN * 1e6
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    resident, own = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return {"read_s": read_s, "draw_us": draw_us, "resident_bytes": resident, "own_bytes": own}


def read_apart(path: Path, cache: Path) -> Values:
    """In a process of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--read", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: Values = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure both starts."""
    bench = Bench(__doc__)
    bench.option("--prompts", type=int, default=1_000_000)
    bench.option("--read", default="", help="of a process that reads")
    arguments, rounds = bench.parse(), {}
    if arguments.read:
        sys.stdout.write(json.dumps(read(arguments.read)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        write_prompts(path, arguments.prompts)
        for case in ("first start", "later start"):
            found = read_apart(path, Path(folder, "cache"))
            rounds[case] = [found]
            bench.add_all(found, case)
    bench.write(rounds)


if __name__ == "__main__":
    main()
