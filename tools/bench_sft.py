"""`llamarl sft` beside TRL's SFTTrainer: the same demonstrations on the same core, by turns.

    python tools/bench_sft.py [--rounds 3] [--steps 12] [--quick] [--json FILE]

The model is a Llama of 3 million parameters with random weights; the demonstrations are sums of 4
to 30 numbers with their worked answers (45 to 600 tokens). Both sides get the same checkpoint, the
same demonstrations in the order of the file, as many per step, AdamW with the same numbers, a
constant learning rate, float32, and one thread; each is pinned to one core, by turns. The loss is
the mean over the tokens of the answers. TRL packs the demonstrations of a step into one sequence
(`padding_free=True`), or pads them to the longest.

`step_s` is the median of a run's steps after the first two. `vs_trl` is the ratio of TRL's faster
way to llamarl's, the median of the rounds. `loss_difference` is the largest relative difference
between both loss curves.
--quick: one short round of our side only.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import rivals
from half_good import ARCHITECTURE as SMALL
from half_good import new_model, save, write_json, write_rows
from harness import Bench, Values
from live_run import INLINE, PROGRAM, LiveRun, finish
from make_quickstart import question_of, worked_answer, write_tokenizer

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
CONFIG = {**SMALL, **SIZES, "num_attention_heads": 8, "max_position_embeddings": 1024}
BATCH = 16
NUM_SKIPPED = 2  # first steps, which load what is used later
OWN, PACKED, PADDED = "llamarl", "TRL, packed", "TRL, padded"
GOALS = {"loss_difference": "<= 0.01", "vs_trl": "> 1"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides are given."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def write_recipe(folder: Path, num_rows: int) -> Path:
    """A checkpoint of random weights, demonstrations, and llamarl's recipe of them."""
    (folder / "checkpoint").mkdir(parents=True)
    write_tokenizer(folder / "checkpoint", seed=0)
    write_json(folder / "checkpoint" / "config.json", CONFIG)
    save(new_model(folder / "checkpoint", 0), folder / "checkpoint")
    drawn = random.Random(0)
    sums = [[drawn.randint(1, 99) for _ in range(drawn.randint(4, 30))] for _ in range(num_rows)]
    rows = [{"question": question_of(s), "completion": worked_answer(s)} for s in sums]
    write_rows(folder / "demonstrations.jsonl", rows)
    recipe = {
        "defaults": ["config", "_self_"],
        "model": {"checkpoint": "checkpoint"},
        "data": {"prompts": "demonstrations.jsonl", "shuffle": False},
        "trainer": {"groups_per_step": BATCH, **asdict(Setting())},
        "checkpoint": {"every_steps": 0, "export": False},
        "metrics": {"trackers": [], "live": False},
    }
    write_json(folder / "run.yaml", recipe)  # JSON is YAML
    return folder


def pin() -> None:
    """Keep this process, and those it starts, on one core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])


def run_llamarl(recipe: Path, out: Path, num_steps: int, *more: str) -> LiveRun:
    options = (f"--config-dir={recipe}", f"run_dir={out}", f"num_steps={num_steps}")
    finish([sys.executable, *PROGRAM, "sft", *options, *more], pin)
    return LiveRun(out)


def run_trl(recipe: Path, out: Path, num_steps: int, *, is_packed: bool) -> LiveRun:
    out.mkdir(parents=True)
    job = {
        "checkpoint": str(recipe / "checkpoint"),
        "demonstrations": str(recipe / "demonstrations.jsonl"),
        "out": str(out),
        "num_steps": num_steps,
        "batch_size": BATCH,
        "is_packed": is_packed,
        **asdict(Setting()),
    }
    (out / "job.json").write_text(json.dumps(job))
    words = [str(rivals.PYTHON), "-m", "peers_bench.trl_sft_program", str(out / "job.json")]
    done = subprocess.run(
        words, env=rivals.environment(), capture_output=True, text=True, preexec_fn=pin
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return LiveRun(out)


def losses(run: LiveRun) -> list[float]:
    return [step["loss/train"] for step in run.steps]


def compare(
    bench: Bench, num_rounds: int, num_steps: int, has_rival: bool, *more: str
) -> dict[str, list[Values]]:
    """Both sides by turns."""
    rounds: dict[str, list[Values]] = {}
    curves: dict[str, list[float]] = {}
    ways = [OWN, PACKED, PADDED] if has_rival else [OWN]
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        recipe = write_recipe(Path(folder) / "recipe", BATCH * num_steps)
        for number, way in harness.turns(ways, num_rounds):
            out = Path(folder) / f"{way}-{number}".replace(", ", "-")
            if way == OWN:
                found = run_llamarl(recipe, out, num_steps, *more)
            else:
                found = run_trl(recipe, out, num_steps, is_packed=way == PACKED)
            curves[way] = losses(found)
            values = {"step_s": statistics.median(found.steps_s[NUM_SKIPPED:])}
            rounds.setdefault(way, []).append(values)
            print(f"{way}, round {number}: {values}", flush=True)
    bench.add_medians(rounds)
    for way in (PACKED, PADDED):
        if way in curves:
            pairs = zip(curves[way], curves[OWN], strict=True)
            bench.add("loss_difference", max(abs(a - b) / b for a, b in pairs), way)
    seconds = {way: [each["step_s"] for each in found] for way, found in rounds.items()}
    ratios = [[a / b for a, b in zip(seconds[w], seconds[OWN], strict=True)] for w in ways[1:]]
    best = min(ratios, key=statistics.median, default=[])
    bench.add("vs_trl", statistics.median(best) if best else None, "", best)
    return rounds


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--rounds", type=int, default=3)
    bench.option("--steps", type=int, default=12, help="optimizer steps of a run")
    bench.option("--quick", action="store_true", help="one short round, without TRL")
    arguments = bench.parse()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, NUM_SKIPPED + 1
    reason = "--quick measures our side only" if arguments.quick else rivals.why_not("trl")
    if reason:
        print(f"without TRL: {reason}")
    more = [INLINE] if arguments.quick else []
    bench.write(compare(bench, arguments.rounds, arguments.steps, not reason, *more))


if __name__ == "__main__":
    main()
