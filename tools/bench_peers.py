"""Training beside TRL's GRPOTrainer: the same task, the same cores, by turns.

    python tools/bench_peers.py [--tasks plain tools] [--rounds 3] [--steps 10] [--json FILE]

Both sides get the recipe's checkpoint, its prompts in the order of the file, its limits of turns
and tokens, its reward, as many rollouts per prompt and prompts per step, its optimizer, learning
rate and warm-up, temperature, and float32. The loss is the same on policy: reward minus the group's
mean, over the tokens that the model wrote. Both run on the same one or two cores, which bound the
affinity of all their processes.

`plain`: prompts of 16 tokens, 64 rollouts a step of one turn, a model of 3.2M parameters with
random weights (peers_bench/plain.py). Lengths are equal (128 tokens), or have a long tail:
log-normal, mean 64, 99th percentile six times that, cap eight times. Each rollout writes as many
tokens on both sides: llamarl replays lengths, and TRL gets a logits processor that lets a rollout
end there and not before. Neither side knows lengths before they are over. The reward is the share
of even words, so every group has a gradient and nothing is skipped.

`tools`: `recipes/quickstart_tools`, where a small checkpoint learns to call a calculator over two
to four turns.

llamarl runs the recipe as it stands: asynchronous, staleness 1, a process of one thread for each
executor; for plain training on two cores also with two trainer ranks. TRL is synchronous and on
policy. It runs in the environment of `make rivals`, with transformers' generation, for tools as its
documentation has it (`tools=`): one process with a thread per core, or two that share the rollouts
(torchrun). Its settings are those that were fastest here: micro-batches of 128 rollouts with tools
and 16 without, one generation for the whole step, no activation checkpointing, sdpa, threads that
do not spin while they wait. transformers' continuous batching takes ten times as long on a CPU.
vLLM is used on neither side. llamarl skips the forward and backward pass of rollouts whose
advantage is 0, and packs the others; TRL pads all of a step to the longest.

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
counts what the model wrote in the rollouts that were trained. `reward` is the mean of the last
LAST_STEPS steps; llamarl's
rollouts are of the version before. `accuracy` is that of the checkpoints that both export, by
`llamarl evaluate` on all held-out prompts. `vs_trl_equal`, `vs_trl_long_tail`, `vs_trl_tools`,
`vs_trl_slow_tools` and `vs_trl_slow_tools_gathered` are the seconds per step of TRL's fastest way
over those of llamarl's fastest, the median of the rounds' ratios; `..._processor` the same of
`processor_s`. Plain training on one core never waits, so there `vs_trl_...` is of `processor_s`
too, which other programs on the machine change little.
--quick: one short round of our side only, of one workload of each task, on one core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import harness
import rivals
from harness import Bench, Values, medians
from live_run import INLINE, LiveRun, evaluate
from peers_bench.plain import EQUAL, LONG_TAIL, write_plain_recipe
from peers_bench.sides import Run, Side, own_ways, trl_ways

INSTANT, SLOW = "instant tools", "slow tools"
RECIPE = harness.ROOT / "recipes" / "quickstart_tools"
TASKS = {"plain": (EQUAL, LONG_TAIL), "tools": (INSTANT, SLOW)}
SHARED = ("checkpoint", "prompts.jsonl", "held_out.jsonl", "run.yaml")
LAST_STEPS = 3
RATIOS = (  # name, workload, whether TRL's calls are gathered
    ("vs_trl_equal", EQUAL, False),
    ("vs_trl_long_tail", LONG_TAIL, False),
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
GOALS = {
    "vs_trl_equal": ">= 2",
    "vs_trl_long_tail": ">= 4",
    "vs_trl_tools": ">= 2",
    "vs_trl_slow_tools": ">= 4",
}
QUICK = ("trainer.groups_per_step=1", INLINE)
QUICK_WORKLOADS = (EQUAL, INSTANT)


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
        for lengths in TASKS["plain"]:
            self._recipes[lengths] = write_plain_recipe(folder / lengths.split()[0], lengths)
        self.rounds: dict[str, list[Values]] = {}

    def compare(self, workload: str, num_cores: int, has_rival: bool) -> None:
        """Both sides by turns, with this workload on this many cores."""
        ways: dict[str, Side] = own_ways(num_cores, is_plain=workload in TASKS["plain"])
        for _, wanted, are_gathered in RATIOS if has_rival else ():
            if wanted == workload:
                ways |= trl_ways(num_cores, are_calls_gathered=are_gathered)
        for number, name in harness.turns(ways, self._arguments.rounds):
            values = self._run(ways[name], workload, num_cores, number)
            self.rounds.setdefault(case(workload, num_cores, name), []).append(values)
            print(f"{case(workload, num_cores, name)}, round {number}: {values}", flush=True)

    def ratios(
        self, workload: str, num_cores: int, are_gathered: bool, measure: str
    ) -> list[float]:
        """`measure` of TRL's fastest way over that of our fastest, round by round."""
        own = own_ways(num_cores, is_plain=workload in TASKS["plain"])
        rival = trl_ways(num_cores, are_calls_gathered=are_gathered)
        ours, theirs = (self._fastest(workload, num_cores, ways) for ways in (own, rival))
        return [b[measure] / a[measure] for a, b in zip(ours, theirs, strict=bool(theirs))]

    def _fastest(self, workload: str, num_cores: int, ways: Iterable[str]) -> list[Values]:
        found = [self.rounds.get(case(workload, num_cores, way), []) for way in ways]
        return min(filter(None, found), key=lambda each: medians(each)["step_s"], default=[])

    def _run(self, side: Side, workload: str, num_cores: int, number: int) -> Values:
        arguments = self._arguments
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            run = Run(
                recipe=self._recipes[workload],
                folder=Path(folder) / "run",
                num_cores=num_cores,
                num_steps=arguments.slow_steps if workload == SLOW else arguments.steps,
                seed=number,
                options=QUICK if arguments.quick else (),
            )
            trained = side(run)
            if workload == SLOW:
                return trained.values
            if workload in TASKS["plain"]:
                rewards = [step["reward/mean"] for step in LiveRun(run.folder).steps]
                return trained.values | {"reward": statistics.mean(rewards[-LAST_STEPS:])}
            more = (INLINE, "evaluation.max_prompts=32") if arguments.quick else ()
            evaluation = Path(folder) / "evaluation"
            accuracy = evaluate(run.recipe, trained.checkpoint, evaluation, *more)
            return trained.values | {"accuracy": accuracy}


def on(num_cores: int) -> str:
    """In words."""
    return f"{num_cores} {'core' if num_cores == 1 else 'cores'}"


def case(workload: str, num_cores: int, name: str) -> str:
    """In words."""
    return f"{workload}, {on(num_cores)}: {name}"


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    bench.option("--rounds", type=int, default=3)
    bench.option("--steps", type=int, default=10, help="optimizer steps, but with slow tools")
    bench.option("--slow-steps", type=int, default=4, help="and with these")
    bench.option("--cores", type=int, nargs="+", default=[1, 2])
    bench.option("--quick", action="store_true", help="one short round, without TRL")
    arguments = bench.parse()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.cores = 1, 4, [1]
    reason = "--quick measures our side only" if arguments.quick else rivals.why_not("trl")
    if reason:
        print(f"without TRL: {reason}")
    workloads = [workload for task in arguments.tasks for workload in TASKS[task]]
    if arguments.quick:
        workloads = [workload for workload in workloads if workload in QUICK_WORKLOADS]
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        comparison = Comparison(Path(folder), arguments)
        for workload, num_cores in product(workloads, arguments.cores):
            comparison.compare(workload, num_cores, not reason)
    bench.add_medians(comparison.rounds)
    for (name, workload, are_gathered), num_cores in product(RATIOS, arguments.cores):
        if workload not in workloads:
            continue
        never_waits = num_cores == 1 and workload in TASKS["plain"]
        wall = "processor_s" if never_waits else "step_s"
        for measure, end in ((wall, ""), ("processor_s", "_processor")):
            found = comparison.ratios(workload, num_cores, are_gathered, measure)
            middle = statistics.median(found) if found else None
            bench.add(f"{name}{end}", middle, on(num_cores), found)
    bench.write(comparison.rounds)


if __name__ == "__main__":
    main()
