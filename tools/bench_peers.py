"""Training with tools beside TRL's GRPOTrainer: the same task, the same cores, by turns.

    python tools/bench_peers.py [--rounds 3] [--steps 10] [--slow-steps 4] [--json FILE]

The task is `recipes/quickstart_tools`: a small checkpoint learns to call a calculator over two to
four turns. Both sides get its checkpoint, its prompts in the order of the file, its limits of turns
and tokens, its reward, as many rollouts per prompt and prompts per step, its optimizer, learning
rate and warm-up, temperature, and float32. The loss is the same on policy: reward minus the group's
mean, over the tokens that the model wrote. Both run on the same one or two cores, which bound the
affinity of all their processes.

llamarl runs the recipe as it stands: nine processes of one thread, staleness 1. TRL runs in the
environment of `make rivals`, synchronous and on policy, with transformers' generation, as its
documentation has it for tools (`tools=`): one process with a thread per core, or two that share the
rollouts (torchrun). Its settings are those that were fastest here: micro-batches of 128 rollouts,
one generation for the whole step, no activation checkpointing, sdpa, threads that do not spin while
they wait; transformers' continuous batching takes ten times as long on a CPU. vLLM is not used on either side.
Its chat template is the recipe's, which must also render calls there, and its response template
reads calls as the recipe's `environment.calls` does (peers_bench/trl_program.py).

Tools are instant, or slow: each call sleeps, as a coroutine, for a log-normal time (median 20 ms,
mean 62 ms, 1 in 1000 above 2 s), drawn from the same seed on both sides. Among the calls of one
turn of one rollout TRL runs coroutines together, but rollouts one after another. So there is a
second way for slow tools, `rollout_func`, which TRL calls experimental: a loop of our own around
TRL's generation that runs the calls of all rollouts of a turn together.

`step_s` is the mean from the start of the first step, so filling llamarl's pipeline counts.
`processor_s` is what all processes together compute in a step, without the first one; other
programs on the machine change it less. `tokens_per_s` counts what the model wrote in the rollouts
that were trained. `peak_bytes` is the memory of all processes together that is no file's.
`accuracy` is that of the checkpoints that both export, by `llamarl evaluate` on all held-out
prompts. Ratios compare runs of one round, and their median counts; `vs_trl_tools` and
`vs_trl_slow_tools` are those of TRL's fastest way.
--quick: one short round of our side only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path

import harness
import rivals
from harness import Bench, Values
from live_run import evaluate
from peers_bench.sides import Run, Side, run_llamarl, trl_ways

RECIPE = harness.ROOT / "recipes" / "quickstart_tools"
SHARED = ("checkpoint", "prompts.jsonl", "held_out.jsonl", "run.yaml")
OWN = "llamarl"
RATIOS = {"instant": "vs_trl_tools", "slow": "vs_trl_slow_tools"}
SLEEPING = """

import asyncio
import functools
import math
import random

DRAWS = random.Random(0)


def slowed(tool):
    @functools.wraps(tool)
    async def run(*arguments, **named):
        await asyncio.sleep(DRAWS.lognormvariate(math.log(0.020), 1.5))
        return tool(*arguments, **named)

    return run


tools = [slowed(tool) for tool in tools]
"""
QUICK = ("trainer.groups_per_step=4",)


def write_slow_recipe(folder: Path) -> Path:
    """The recipe with tools that take their time."""
    folder.mkdir()
    for name in SHARED:
        (folder / name).symlink_to(RECIPE / name)
    (folder / "task.py").write_text((RECIPE / "task.py").read_text() + SLEEPING)
    return folder


class Comparison:
    """All runs, and what each round gave."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._recipes = {"instant": RECIPE, "slow": write_slow_recipe(folder / "slow")}
        self._options = QUICK if arguments.quick else ()
        self.rounds: dict[str, list[Values]] = {}

    def compare(self, tools: str, num_cores: int, has_rival: bool) -> None:
        """Both sides by turns, with these tools on this many cores."""
        ways: dict[str, Side] = {OWN: run_llamarl}
        if has_rival:
            ways |= trl_ways(num_cores, tools == "slow")
        for number, name in harness.turns(ways, self._arguments.rounds):
            values = self._run(ways[name], tools, num_cores, number)
            self.rounds.setdefault(case(tools, num_cores, name), []).append(values)
            print(f"{case(tools, num_cores, name)}, round {number}: {values}", flush=True)

    def _run(self, side: Side, tools: str, num_cores: int, number: int) -> Values:
        recipe, is_slow = self._recipes[tools], tools == "slow"
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            trained = side(
                Run(
                    recipe=recipe,
                    folder=Path(folder) / "run",
                    num_cores=num_cores,
                    num_steps=self._arguments.slow_steps if is_slow else self._arguments.steps,
                    seed=number,
                    options=self._options,
                )
            )
            if is_slow:
                return trained.values
            accuracy = evaluate(recipe, trained.checkpoint, Path(folder) / "evaluation")
            return trained.values | {"accuracy": accuracy}

    def ratios(self, tools: str, num_cores: int) -> dict[str, list[float]]:
        """By TRL's ways: its seconds per step over ours, round by round."""
        own = self.rounds[case(tools, num_cores, OWN)]
        begin = case(tools, num_cores, "TRL")
        return {
            name: [
                theirs["step_s"] / ours["step_s"] for theirs, ours in zip(found, own, strict=True)
            ]
            for name, found in self.rounds.items()
            if name.startswith(begin)
        }


def case(tools: str, num_cores: int, name: str) -> str:
    """In words."""
    return f"{tools} tools, {num_cores} {'core' if num_cores == 1 else 'cores'}: {name}"


def main() -> None:
    bench = Bench(__doc__, {"vs_trl_tools": ">= 2", "vs_trl_slow_tools": ">= 4"})
    bench.option("--rounds", type=int, default=3)
    bench.option("--steps", type=int, default=10, help="optimizer steps with instant tools")
    bench.option("--slow-steps", type=int, default=4, help="and with slow ones")
    bench.option("--cores", type=int, nargs="+", default=[1, 2])
    bench.option("--tools", nargs="+", default=list(RATIOS), choices=list(RATIOS))
    bench.option("--quick", action="store_true", help="one short round, without TRL")
    arguments = bench.parse()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.slow_steps = 1, 3, 3
    reason = "--quick measures our side only" if arguments.quick else rivals.why_not("trl")
    if reason:
        print(f"without TRL: {reason}")
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        comparison = Comparison(Path(folder), arguments)
        for tools, num_cores in product(arguments.tools, arguments.cores):
            comparison.compare(tools, num_cores, not reason)
    bench.add_medians(comparison.rounds)
    for tools, num_cores in product(arguments.tools, arguments.cores):
        name, found = RATIOS[tools], comparison.ratios(tools, num_cores)
        for way, ratios in found.items():
            bench.add("times_as_long", statistics.median(ratios), way, ratios)
        fastest: list[float] = min(found.values(), key=statistics.median, default=[])
        bench.add(
            name,
            statistics.median(fastest) if fastest else None,
            f"{num_cores} {'core' if num_cores == 1 else 'cores'}",
            fastest,
        )
    bench.write(comparison.rounds)


if __name__ == "__main__":
    main()
