"""What the random searches of the loop draw: whole combinations of options and faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarl.controller.lengths import History, Learnt, Oracle, Ranker
from llamarl.core.config import DispatchConfig
from llamarl.core.records import Prompt, Request
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import make_skew
from llamarl.scoring.samplers import ReadyItem, Sample
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop, heavy_tail, slower
from tests.simulation.test_loop import STAGES

MANY_RESTARTS = 1000
MOST_ROLLOUTS = 60  # that are written for a run's steps, or about that
GRAPHS = (
    ((), ("reward",)),
    (STAGES[:1], ("reward",)),
    (STAGES[:2], ("reward", "quality")),
    (STAGES, ("reward", "blended")),
)


def by_prompt(request: Request) -> int:
    """1 to 100 tokens, mostly as many as its prompt's other rollouts."""
    prompt, rollout = random.Random(request.prompt_ids[0]), random.Random(request.seed)
    return min(100, 1 + round(5 * math.exp(prompt.gauss(0, 1.2) + rollout.gauss(0, 0.3))))


@dataclass
class Chooser:
    """A recipe's own sampler: takes any groups once so many more than it needs are ready, and
    consumes a share of them only when it takes them again."""

    rng: random.Random
    num_spare: int
    again_share: float

    def __call__(self, ready: Sequence[ReadyItem], count: int) -> Sample:
        if len(ready) < count + self.num_spare:
            return [], []
        taken = self.rng.sample(ready, count)
        consumed = [i for i in taken if i.times_taken or self.rng.random() >= self.again_share]
        return [item.item_id for item in taken], [item.item_id for item in consumed]


def draw(rng: random.Random, **fixed: Any) -> Loop:
    """A run of any options, but for `fixed` ones, in which anything may go wrong."""
    options = _options(rng) | fixed
    ranker = options.pop("ranker")
    if options["sampler"] == "task":
        most_spare = options["max_staleness"] * options["groups_per_step"]
        num_spare = rng.randint(0, most_spare)
        options["sample"] = Chooser(random.Random(rng.random()), num_spare, rng.choice([0.0, 0.5]))
    faults = _faults(rng, options)
    loop = Loop(**options, max_stage_restarts=MANY_RESTARTS, faults=faults)
    if ranker is not None:
        dispatch = DispatchConfig(
            ranker="none",
            tail_share=rng.choice([0.0, 0.3, 0.3, 0.5]),
        )
        loop.skew = make_skew(replace(loop.config, dispatch=dispatch), loop.costs, ranker, 50)
    return loop


def _options(rng: random.Random) -> dict[str, Any]:
    """What a recipe may choose, in small numbers."""
    late = rng.choice(["wait", "mask"])
    stages, reward_columns = rng.choice(GRAPHS) if rng.random() < 0.4 else GRAPHS[0]
    length = rng.choice([heavy_tail, by_prompt])
    options = {
        "groups_per_step": rng.choice([1, 2, 4]),
        "rollouts_per_prompt": rng.choice([2, 3, 5]),
        "max_staleness": rng.randint(0, 3),
        "late": late,
        "segment_tokens": rng.choice([0, 0, 1, 7]),
        "parts": rng.choice(["dynamic", "batch"]),
        "sampler": rng.choice(["admission", "group_complete"] + ["task"] * (late == "mask")),
        "evaluate_every": rng.choice([0, 1, 3]),
        "num_held_out": rng.choice([0, 5]),
        "save_every": rng.choice([0, 1, 3]),
        "exports": rng.random() < 0.5,
        "max_num_seqs": rng.choice([1, 4, 64]),
        "length": length,
        "ranker": _ranker(rng, length),
        "drop_share": rng.choice([0.0, 0.3, 0.8]),
        "failed_share": rng.choice([0.0, 0.05]),
        "stages": stages,
        "reward_columns": reward_columns,
        "stage_drop_share": rng.choice([0.0, 0.1]),
        "prompts": _prompts(rng),
        "num_epochs": rng.choice([0, 0, 0, 0.3, 1, 2.5]),
        "repeat_share": rng.choice([1.0, 1.0, 0.3]),
        "deadline_s": rng.choice([math.inf, math.inf, 0.0, 3.0]),
        "max_drops_in_row": 10**6,
        "costs": _costs(rng),
    }
    options |= _replicas(rng)
    options |= _batches(rng, options)
    if rng.random() < 0.4:
        options |= _episodes(rng)
    least = 1
    if rng.random() < 0.15:
        least = 4
        options |= _splitting(rng, options)
    elif options.get("elastic"):  # several steps must ask for the same
        least = 6
        options |= {"groups_per_step": 1, "rollouts_per_prompt": 2, "drop_share": 0.0}
    options["tokens_per_micro_batch"] = rng.choice([1, 8, 4096])
    share = 1 - options["drop_share"]
    per_step = options["groups_per_step"] * options["rollouts_per_prompt"]
    most = max(3, least, round(MOST_ROLLOUTS * share / per_step))
    return options | {"num_steps": rng.randint(least, min(12, most))}


def _splitting(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """What makes some replicas take the long rollouts of a step, the others the rest."""
    return {
        "num_replicas": rng.randint(3, 4),
        "pools": (),
        "elastic": (),
        "is_colocated": False,
        "max_restarts": MANY_RESTARTS,
        "max_num_seqs": 64,
        "ranker": Oracle(by_prompt),
        "length": by_prompt,
        "prompts": None,
        "max_staleness": 0,
        "groups_per_step": 8,
        "num_mini_batches": 1,
        "num_passes": 1,
        "rollouts_per_prompt": 2,
        "drop_share": 0.0,
        "costs": replace(options["costs"], decode_row_s=0.01),
    }


def _batches(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """How many optimizer steps follow from a batch."""
    proximal = rng.choice(["none", "recompute", "interpolate"])
    if options["sampler"] == "task" or rng.random() < 0.5:
        return {"proximal": proximal}
    mini_batches, passes = rng.choice([(2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (1, 3)])
    return {
        "num_mini_batches": mini_batches,
        "num_passes": passes,
        "proximal": proximal,
        "max_staleness": options["max_staleness"] + mini_batches * passes - 1,
    }


def _episodes(rng: random.Random) -> dict[str, Any]:
    """Rollouts that take turns, with tools that take no time, or now and then very long."""
    tail = (0.0,) * 8 + (0.3, rng.choice([2.0, 40.0]))
    return {
        "most_turns": rng.choice([1, 3, 8]),
        "most_conversations": rng.choice([1, 1, 2, 5]),
        "are_parallel": rng.random() < 0.5,
        "tool_seconds": rng.choice([(0.0,), (0.01, 0.1), tail]),
        "tool_failed_share": rng.choice([0.0, 0.0, 0.02]),
        "observation_tokens": rng.choice([1, 5]),
    }


def _costs(rng: random.Random) -> Costs:
    return replace(
        COSTS,
        start_s=rng.choice([0.0, 1.0, 5.0]),
        part_s=rng.choice([0.01, 0.1, 1.0]),
        decode_row_s=rng.choice([0.0, 0.01]),
        optimizer_s=rng.choice([0.0, 0.05]),
        save_s=rng.choice([0.0, 0.3]),
        message_s=rng.choice([0.0, 0.0, 0.004]),
    )


def _replicas(rng: random.Random) -> dict[str, Any]:
    """Replicas on the trainer's device, in pools, as many as are needed, or a fixed number."""
    num_replicas = rng.randint(1, 4)
    kind = rng.choices(["fixed", "colocated", "pools", "elastic"], [45, 15, 25, 15])[0]
    found: dict[str, Any] = {
        "num_replicas": num_replicas,
        "is_colocated": kind == "colocated",
        "max_restarts": 0 if kind == "colocated" else MANY_RESTARTS,
    }
    if kind == "pools":
        sizes = [rng.randint(1, 2) for _ in range(rng.randint(2, 3))]
        found["num_replicas"] = num_replicas = sum(sizes)
        found["pools"] = [
            f"num_replicas={size} max_num_seqs={rng.choice([1, 4, 64])}" for size in sizes
        ]
    if kind == "elastic":
        found["elastic"] = rng.randint(1, num_replicas), rng.randint(num_replicas, 4)
    return found | {"num_collectors": rng.randint(0, min(2, num_replicas))}


def _prompts(rng: random.Random) -> list[Prompt] | None:
    """So few that they come again, or the workload's own."""
    number = rng.choice([1, 4, 30, 0])
    return [Prompt(prompt_id=i, text="", token_ids=(i, 0)) for i in range(number)] or None


def _ranker(rng: random.Random, length: Callable[[Request], int]) -> Ranker | None:
    kinds = [None, Ranker, History, lambda: Oracle(length), Learnt]
    make = rng.choices(kinds, [55, 5, 15, 20, 3])[0]
    return make() if make else None


def _faults(rng: random.Random, options: dict[str, Any]) -> dict[str, Faults]:
    """Replicas, collectors and executors of stages die, fall silent, pause or are slow, and so do
    those that take their places; storage takes its time."""
    found: dict[str, Faults] = {}
    if not options["is_colocated"] and rng.random() < 0.6:
        methods = ["submit", "collect", "commit", "prepare"]
        for replica in range(options["num_replicas"]):
            found |= _deaths(rng, f"generator-{replica}", methods)
    if rng.random() < 0.4:
        for number in range(options["num_collectors"]):
            found |= _deaths(rng, f"collector-{number}", ["collect", "follow"])
    if rng.random() < 0.3:
        for name in ("scorer", *(stage.name for stage in options["stages"])):
            found |= _deaths(rng, name, ["process"])
    if options.get("most_turns") and rng.random() < 0.4:
        found |= _deaths(rng, "environment-0", ["answer"])
    if rng.random() < 0.5:
        delay_s = rng.choice([0.001, 0.02, 0.2])
        methods = rng.sample(["write", "read", "retire", "find"], 2)
        found["storage-0"] = Faults(delays_s=dict.fromkeys(methods, (0.0, delay_s)))
    return found


def _deaths(rng: random.Random, name: str, methods: list[str]) -> dict[str, Faults]:
    """What happens to one executor, and to the one after it."""
    found: dict[str, Faults] = {}
    at_s = 0.0
    for number in range(1, rng.randint(1, 4)):
        at_s += rng.choice([0.05, 0.5, 3.0]) * rng.uniform(0.1, 2.0)
        method = rng.choice(methods)
        is_stage = method == "process"
        slow = {"score_call_s": 0.3} if is_stage else {"decode_step_s": 0.1}
        found[name + (f" {number}" if number > 1 else "")] = rng.choice(
            [
                Faults(dies_at_s=at_s),
                Faults(silent_s=(at_s, at_s + 100.0)),
                Faults(silent_s=(at_s, at_s + rng.uniform(0.1, 4.0))),
                Faults(silent_s=(at_s, at_s + 37.0), ignores_stop=is_stage),
                Faults(dies_after={method: rng.randint(1, 4)}),
                Faults(delays_s={method: (0.0, rng.choice([0.1, 2.0]))}, dies_at_s=at_s + 9),
                replace(slower(**slow), dies_at_s=at_s),
            ]
        )
    return found


def due_evaluations(loop: Loop) -> list[int]:
    """The versions that a run without losses evaluates."""
    every = loop.evaluate_every or math.inf
    last = loop.trainer.version
    between = [version for version in range(1, last) if version % every == 0]
    return sorted({0, *between, last}) if loop.num_held_out else []
