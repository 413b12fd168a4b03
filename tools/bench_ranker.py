"""How well a run's rankers find the longest fifth of the prompts that it has not seen.

    python tools/bench_ranker.py [--json FILE] [--run RUN] [--quick]

Recall: of the prompts whose rollouts are the longest 20 % of a step, the share that is among the
20 % that were expected to be. A ranker knows what has ended when a step is submitted: everything up
to two steps before it. The truth is the mean length of every second rollout of a prompt.

    quickstart  the recipe's own run (RUN, made with experience.keep_rollouts=1, or a new one):
                30 steps in which the policy learns to write more, where it wrote least most of all
    made        64 prompts of 8 rollouts a step; a length is exp(N(0, 0.8)) by what is in the prompt
                times exp(N(0, 0.5)) by chance; words are drawn by a law of Zipf, each adds its part
    drift       the same for 40 steps, then half of the words mean something else and all is twice
                as long; recall over the 5 steps after it, and later
    returning   the made task with 640 prompts, which come back every 10 steps

    dispatch    seconds of a simulated step relative to `none`, with the run's own controller, the
                prompts of `returning` and S = 0 or 1: 8 replicas with 32 slots, whose decode steps
                take 10 ms and 0.25 ms per rollout; a trainer that takes next to no time

    none        chance, 0.20
    history, model
                the rankers of `dispatch.ranker`
    size        the number of the prompt's tokens, longest first: what costs nothing
    oracle      knows each length
    ideal       an oracle that knows the expected length of a prompt, but not the noise; of the
                quickstart, whose expected lengths are not known, the mean of the other rollouts

--quick: a short run, and few prompts in all steps; its figures say nothing.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Bench, Values
from live_run import INLINE, RECIPE, train

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EmbeddedConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.lengths.ranker import History, Learnt, Oracle, Ranker, Unranked
from llamarl.models.architecture import read_architecture
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.workload import Workload
from llamarl.types import Prompt, Request, Sampling

ARCHITECTURE = RECIPE / "checkpoint"
LONG_SHARE = 0.2
LAG = 2  # steps of which nothing is known when one is submitted
GROUPS, ROLLOUTS = 64, 8  # of a made step
QUICK_GROUPS = 5  # of every step
QUICK = (f"trainer.groups_per_step={QUICK_GROUPS}", "num_steps=9", "data.held_out=null", INLINE)
NUM_RETURNING = 10  # steps until a prompt comes back
PROMPT_SPREAD, NOISE = 0.8, 0.5  # of log-lengths
NUM_WORDS, MEDIAN, MOST = 2000, 200, 8192
RANKERS: dict[str, Callable[[], Ranker]] = {"none": Unranked, "history": History, "model": Learnt}


@dataclass(frozen=True)
class Item:
    """A prompt in a step: the lengths of its rollouts, and what an oracle expects of them."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    ideal: float

    @property
    def truth(self) -> float:
        """Mean length of every second rollout."""
        return statistics.mean(self.lengths[1::2])


Step = list[Item]


def recall(guesses: Sequence[float], step: Step, chosen: random.Random) -> float:
    """Equal guesses in any order."""
    count = max(1, round(LONG_SHARE * len(step)))
    ties = [chosen.random() for _ in step]
    order = sorted(range(len(step)), key=lambda i: (-guesses[i], ties[i]))
    truly = sorted(range(len(step)), key=lambda i: (-step[i].truth, ties[i]))
    return len({*order[:count]} & {*truly[:count]}) / count


def recalls(steps: list[Step], make: Callable[[], Ranker]) -> tuple[list[float], Values]:
    """The recall of each step, and the milliseconds of a refit and of a step's expectations."""
    ranker, chosen, found = make(), random.Random(0), []
    refits_ms, expects_ms = [], []
    for number, step in enumerate(steps):
        for item in steps[number - LAG] if number >= LAG else []:
            for length in item.lengths:
                ranker.observe(ask(item.prompt), length)
        start = time.thread_time()
        ranker.refit()
        refits_ms.append((time.thread_time() - start) * 1e3)
        start = time.thread_time()
        guesses = ranker.expect([ask(item.prompt) for item in step])
        expects_ms.append((time.thread_time() - start) * 1e3)
        found.append(recall(guesses, step, chosen))
    ms = {"refit_ms": statistics.median(refits_ms), "expect_ms": statistics.median(expects_ms)}
    return found, ms


def ask(prompt: tuple[int, ...]) -> Request:
    """A rollout of this prompt."""
    return Request(row_id=0, prompt_ids=prompt, sampling=Sampling(max_tokens=2**24), seed=0)


def made(
    num_steps: int, num_groups: int, *, drift_at: int = 10**9, num_prompts: int = 0
) -> list[Step]:
    """Steps of the made task; `num_prompts` 0: each prompt is new."""
    rng = random.Random(0)
    weights = [1 / (rank + 3) for rank in range(NUM_WORDS)]
    meaning = [rng.gauss(0, 1) for _ in range(NUM_WORDS)]

    def words() -> tuple[int, ...]:
        return tuple(rng.choices(range(NUM_WORDS), weights, k=rng.randint(20, 60)))

    def raw(prompt: tuple[int, ...]) -> float:
        return sum(meaning[word] for word in prompt) / math.sqrt(len(prompt))

    pool = [words() for _ in range(num_prompts)]
    steps = []
    for number in range(num_steps):
        if number == drift_at:
            for word in range(0, NUM_WORDS, 2):
                meaning[word] = rng.gauss(0, 1)
        if number in (0, drift_at):
            sample = [raw(words()) for _ in range(200)]
            center, scale = statistics.mean(sample), statistics.stdev(sample)
        median = MEDIAN * (2 if number >= drift_at else 1)
        first = number * num_groups % max(1, num_prompts)
        prompts = pool[first : first + num_groups] if pool else [words() for _ in range(num_groups)]
        step = []
        for prompt in prompts:
            ideal = median * math.exp(PROMPT_SPREAD * (raw(prompt) - center) / scale)
            lengths = [
                max(1, round(ideal * math.exp(rng.gauss(0, NOISE)))) for _ in range(ROLLOUTS)
            ]
            step.append(Item(prompt, tuple(lengths), ideal))
        steps.append(step)
    return steps


@dataclass(frozen=True, kw_only=True)
class Returning(Workload):
    """Prompts that come back; `ideals` are their expected lengths."""

    ideals: dict[tuple[int, ...], float]

    def prompts(self) -> list[Prompt]:
        return [Prompt(prompt_id=i, text="", token_ids=ids) for i, ids in enumerate(self.ideals)]

    def length(self, request: Request) -> int:
        noise = math.exp(random.Random(request.seed).gauss(0, NOISE))
        return max(1, round(self.ideals[request.prompt_ids] * noise))


def dispatch(steps: list[Step], max_staleness: int) -> Values:
    """Seconds of a step by ranker, relative to none, over the last 20 of 40 steps."""
    config = Config(
        model=ModelConfig(checkpoint="none"),
        data=DataConfig(prompts="none"),
        reward=RewardConfig(),
        algorithm=AIPOConfig(),
        sampling=SamplingConfig(rollouts_per_prompt=ROLLOUTS, max_tokens=MOST),
        generator=EmbeddedConfig(num_replicas=8, max_num_seqs=32, max_model_len=2 * MOST),
        trainer=TrainerConfig(groups_per_step=len(steps[0])),
        weights=WeightsConfig(),
        placement=PlacementConfig(),
        cluster=ClusterConfig(),
        staleness=StalenessConfig(max_staleness=max_staleness),
    )
    costs = Costs(decode_step_s=0.01, decode_row_s=0.00025, part_s=0.1, write_s=0.01)
    ideals = {item.prompt: item.ideal for step in steps for item in step}
    workload = Returning(lengths=(MEDIAN,), prompt_tokens=40, ideals=ideals)
    oracle = {"oracle": lambda: Oracle(workload.length)}
    found = {
        name: simulate(
            config,
            read_architecture(ARCHITECTURE),
            costs,
            workload=workload,
            num_steps=40,
            num_skipped=20,
            ranker=make(),
        ).step_s
        for name, make in (RANKERS | oracle).items()
    }
    return {name: seconds / found["none"] for name, seconds in found.items()}


def quickstart(run: Path) -> list[Step]:
    """What a run has trained on, step by step."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for path in sorted((run / "archive").glob("kept-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["outcome"] == "trained":
                groups[line["version"], tuple(line["prompt_ids"])].append(line["num_tokens"])
    steps: dict[int, Step] = defaultdict(list)
    for (version, prompt), lengths in sorted(groups.items()):
        steps[version].append(Item(prompt, tuple(lengths), statistics.mean(lengths[::2])))
    return [steps[version] for version in sorted(steps)]


def measure(steps: list[Step], windows: dict[str, range]) -> dict[str, Values]:
    """Mean recall by ranker and window."""
    found: dict[str, Values] = {}
    for name, make in RANKERS.items():
        by_step, ms = recalls(steps, make)
        found[name] = {key: statistics.mean(by_step[i] for i in w) for key, w in windows.items()}
        found[name] |= ms
    others: dict[str, Callable[[Item], float]] = {
        "size": lambda item: len(item.prompt),
        "ideal": lambda item: item.ideal,
    }
    for name, guess in others.items():
        chosen = random.Random(0)
        by_step = [recall([guess(item) for item in step], step, chosen) for step in steps]
        found[name] = {key: statistics.mean(by_step[i] for i in w) for key, w in windows.items()}
    return found


def tasks_of(learnt: list[Step], num_groups: int) -> dict[str, tuple[list[Step], dict[str, range]]]:
    """The steps of each task, and the windows over which recall is averaged."""
    third = len(learnt) // 3
    thirds = {
        "first third": range(LAG, third),
        "second third": range(third, 2 * third),
        "last third": range(2 * third, len(learnt)),
    }
    drift = {
        "before": range(30, 40),
        "5 steps after": range(40, 45),
        "10 steps later": range(50, 60),
        "30 steps later": range(70, 80),
    }
    times = {"first time": range(2, 10), "second": range(12, 20), "sixth": range(52, 60)}
    return {
        "quickstart": (learnt, thirds),
        "made": (
            made(60, num_groups),
            {"steps 3 to 12": range(2, 12), "steps 41 to 60": range(40, 60)},
        ),
        "drift": (made(80, num_groups, drift_at=40), drift),
        "returning": (made(60, num_groups, num_prompts=NUM_RETURNING * num_groups), times),
    }


def main() -> None:
    """Measure all."""
    bench = Bench(__doc__)
    bench.option("--run", type=Path)
    bench.option("--quick", action="store_true", help="a short run, few prompts")
    options = bench.parse()
    num_groups = QUICK_GROUPS if options.quick else GROUPS
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder, "run")
        if options.run is None:
            more = QUICK if options.quick else ()
            train(RECIPE, run, "experience.keep_rollouts=1", "metrics.live=false", *more)
        learnt = quickstart(run)
    for task, (steps, windows) in tasks_of(learnt, num_groups).items():
        for ranker, shares in measure(steps, windows).items():
            for window, share in shares.items():
                is_time = window.endswith("_ms")
                name = f"{ranker}_{window}" if is_time else ranker
                bench.add(name, share, task if is_time else f"{task}, {window}")
    returning = made(NUM_RETURNING, num_groups, num_prompts=NUM_RETURNING * num_groups)
    for max_staleness in (0, 1):
        relative_s = dispatch(returning, max_staleness)
        bench.add_all(relative_s, f"dispatch, S = {max_staleness}")
    bench.write()


if __name__ == "__main__":
    main()
