"""Training with tools beside TRL's GRPOTrainer: the same task, the same cores, by turns.

    python tools/bench_peers.py [--rounds 3] [--steps 10] [--slow-steps 4] [--json FILE]

The task is `recipes/quickstart_tools`: a small checkpoint learns to call a calculator over two to
four turns. Both sides get its checkpoint, its prompts in the order of the file, its limits of turns
and tokens, its reward, as many rollouts per prompt and prompts per step, its optimizer, learning
rate and warm-up, temperature, and float32. The loss is the same on policy: reward minus the group's
mean, over the tokens that the model wrote. Both run on the same one or two cores, which bound the
affinity of all their processes.

llamarl runs the recipe as it stands: asynchronous, staleness 1, a process of one thread for each
executor. TRL is synchronous and on policy. It runs in the environment of `make rivals`, with
transformers' generation, as its documentation has it for tools (`tools=`): one process with a
thread per core, or two that share the rollouts (torchrun). Its settings are those that were fastest
here: micro-batches of 128 rollouts, one generation for the whole step, no activation checkpointing,
sdpa, threads that do not spin while they wait. transformers' continuous batching takes ten times as
long on a CPU. vLLM is used on neither side. llamarl skips the forward and backward pass of rollouts
whose advantage is 0, and packs the others; TRL pads all of a step to the longest.

TRL's chat template is the recipe's, which must also render calls there, and its response template
reads calls as the recipe's `environment.calls` does (peers_bench/chat.py).

Tools are instant, or slow: each call sleeps, as a coroutine, for a log-normal time (median 20 ms,
mean 62 ms, 1 in 1000 above 2 s), drawn from the same seed on both sides. TRL's loop runs the calls
of one turn of one rollout together, but rollouts one after another. So slow tools are measured a
second time with calls gathered: as a `rollout_func`, which TRL calls experimental, it gets a loop
of our own around its generation, in which the calls of all rollouts of a turn run together.

`step_s` is the mean from the start of the first step, so filling llamarl's pipeline counts.
`processor_s` is what all processes together compute in a step, without the first one. Beside other
programs it is the fairer figure: many processes get more of a shared core than one. `tokens_per_s`
counts what the model wrote in the rollouts that were trained. `peak_bytes` is the memory of all
processes together that is no file's. `accuracy` is that of the checkpoints that both export, by
`llamarl evaluate` on all held-out prompts. `vs_trl_tools`, `vs_trl_slow_tools` and
`vs_trl_slow_tools_gathered` are the seconds per step of TRL's faster way over llamarl's, the median
of the rounds' ratios.
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
INSTANT, SLOW = "instant tools", "slow tools"
RATIOS = (  # name, tools, whether TRL's calls are gathered
    ("vs_trl_tools", INSTANT, False),
    ("vs_trl_slow_tools", SLOW, False),
    ("vs_trl_slow_tools_gathered", SLOW, True),
)
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
        self._recipes = {INSTANT: RECIPE, SLOW: write_slow_recipe(folder / "slow")}
        self._num_steps = {INSTANT: arguments.steps, SLOW: arguments.slow_steps}
        self.rounds: dict[str, list[Values]] = {}

    def compare(self, tools: str, num_cores: int, has_rival: bool) -> None:
        """Both sides by turns, with these tools on this many cores."""
        ways: dict[str, Side] = {OWN: run_llamarl}
        for _, wanted, are_gathered in RATIOS if has_rival else ():
            if wanted == tools:
                ways |= trl_ways(num_cores, are_calls_gathered=are_gathered)
        for number, name in harness.turns(ways, self._arguments.rounds):
            values = self._run(ways[name], tools, num_cores, number)
            self.rounds.setdefault(case(tools, num_cores, name), []).append(values)
            print(f"{case(tools, num_cores, name)}, round {number}: {values}", flush=True)

    def ratios(self, tools: str, num_cores: int, are_gathered: bool) -> list[float]:
        """Seconds per step of TRL's fastest way over ours, round by round."""
        own = self._steps_s(tools, num_cores, OWN)
        found = [
            [theirs / ours for theirs, ours in zip(steps_s, own, strict=True)]
            for way in trl_ways(num_cores, are_calls_gathered=are_gathered)
            if (steps_s := self._steps_s(tools, num_cores, way))
        ]
        return min(found, key=statistics.median, default=[])

    def _steps_s(self, tools: str, num_cores: int, name: str) -> list[float]:
        return [each["step_s"] for each in self.rounds.get(case(tools, num_cores, name), [])]

    def _run(self, side: Side, tools: str, num_cores: int, number: int) -> Values:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            run = Run(
                recipe=self._recipes[tools],
                folder=Path(folder) / "run",
                num_cores=num_cores,
                num_steps=self._num_steps[tools],
                seed=number,
                options=QUICK if self._arguments.quick else (),
            )
            trained = side(run)
            if tools == SLOW:
                return trained.values
            accuracy = evaluate(run.recipe, trained.checkpoint, Path(folder) / "evaluation")
            return trained.values | {"accuracy": accuracy}


def on(num_cores: int) -> str:
    """In words."""
    return f"{num_cores} {'core' if num_cores == 1 else 'cores'}"


def case(tools: str, num_cores: int, name: str) -> str:
    """In words."""
    return f"{tools}, {on(num_cores)}: {name}"


def main() -> None:
    bench = Bench(__doc__, {"vs_trl_tools": ">= 2", "vs_trl_slow_tools": ">= 4"})
    bench.option("--rounds", type=int, default=3)
    bench.option("--steps", type=int, default=10, help="optimizer steps with instant tools")
    bench.option("--slow-steps", type=int, default=4, help="and with slow ones")
    bench.option("--cores", type=int, nargs="+", default=[1, 2])
    bench.option("--quick", action="store_true", help="one short round, without TRL")
    arguments = bench.parse()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.slow_steps = 1, 3, 3
    reason = "--quick measures our side only" if arguments.quick else rivals.why_not("trl")
    if reason:
        print(f"without TRL: {reason}")
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        comparison = Comparison(Path(folder), arguments)
        for tools, num_cores in product((INSTANT, SLOW), arguments.cores):
            comparison.compare(tools, num_cores, not reason)
    bench.add_medians(comparison.rounds)
    for (name, tools, are_gathered), num_cores in product(RATIOS, arguments.cores):
        found = comparison.ratios(tools, num_cores, are_gathered)
        bench.add(name, statistics.median(found) if found else None, on(num_cores), found)
    bench.write(comparison.rounds)


if __name__ == "__main__":
    main()
