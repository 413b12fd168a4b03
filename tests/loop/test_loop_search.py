"""The real loop under whole combinations of options and faults, on the virtual clock."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.planner.simulation.clock import run
from tests.loop.faults import Faults
from tests.loop.loop import COSTS, Loop, slower
from tests.random_search import case, searched

LIMIT_S = 20_000.0  # of virtual time: a loop that stands still ends there
MANY_RESTARTS = 1000


def options(rng: random.Random) -> dict[str, Any]:
    """What a recipe may choose, in small numbers."""
    groups_per_step = rng.choice([1, 2, 4])
    late = rng.choice(["wait", "mask"])
    is_colocated = rng.random() < 0.2
    num_replicas = rng.randint(1, 4)
    return {
        "num_steps": rng.randint(1, 14),
        "groups_per_step": groups_per_step,
        "rollouts_per_prompt": rng.choice([2, 3, 5]),
        "max_staleness": rng.randint(0, 3),
        "late": late,
        "carry_over_groups": rng.randint(0, 3) if late == "mask" else 0,
        "segment_tokens": rng.choice([0, 0, 1, 7]),
        "parts": rng.choice(["dynamic", "batch"]),
        "groups_per_part": rng.choice([0, 0, 1, groups_per_step]),
        "sampler": rng.choice(["admission", "group_complete"]),
        "evaluate_every": rng.choice([0, 1, 3]),
        "num_held_out": rng.choice([0, 5]),
        "save_every": rng.choice([0, 1, 3]),
        "exports": rng.random() < 0.5,
        "num_replicas": num_replicas,
        "num_collectors": rng.randint(0, min(2, num_replicas)),
        "max_num_seqs": rng.choice([1, 4, 64]),
        "is_colocated": is_colocated,
        "drop_share": rng.choice([0.0, 0.3, 0.9]),
        "failed_share": rng.choice([0.0, 0.05]),
        "max_restarts": 0 if is_colocated else MANY_RESTARTS,
        "max_drops_in_row": 10**6,
        "costs": replace(COSTS, start_s=rng.choice([0.0, 1.0, 5.0])),
    }


def faults_of(rng: random.Random, num_replicas: int) -> dict[str, Faults]:
    """Replicas, and those that take their places, die, fall silent, pause or are slow."""
    found: dict[str, Faults] = {}
    for replica in range(num_replicas):
        at_s = 0.0
        for number in range(1, rng.randint(1, 4)):
            at_s += rng.choice([0.05, 0.5, 3.0]) * rng.uniform(0.1, 2.0)
            name = f"generator-{replica}" + (f" {number}" if number > 1 else "")
            method = rng.choice(["submit", "collect", "commit", "prepare"])
            found[name] = rng.choice(
                [
                    Faults(dies_at_s=at_s),
                    Faults(silent_s=(at_s, at_s + 100.0)),
                    Faults(silent_s=(at_s, at_s + rng.uniform(0.1, 4.0))),
                    Faults(dies_after={method: rng.randint(1, 4)}),
                    Faults(delays_s={method: (0.0, rng.choice([0.1, 2.0]))}, dies_at_s=at_s + 9),
                    replace(slower(decode_step_s=0.1), dies_at_s=at_s),
                ]
            )
    return found


async def scale(loop: Loop, rng: random.Random) -> None:
    """Ask for other numbers of replicas, as a user or the elastic rule would."""
    for _ in range(rng.randint(1, 4)):
        await asyncio.sleep(rng.choice([0.1, 1.0, 5.0]) * rng.random())
        await loop.replica_set.scale(rng.randint(1, 4), drains=rng.random() < 0.5)


async def perform(loop: Loop, rng: random.Random, folder: Path, scales: bool) -> None:
    scaling = asyncio.create_task(scale(loop, rng)) if scales else None
    try:
        async with asyncio.timeout(LIMIT_S):
            await loop.run(folder)
    finally:
        if scaling is not None:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)


def check(loop: Loop) -> None:
    """Every step was made once of whole groups within the bound, every rollout has one outcome
    (`WatchedStorage` asserts the one), and evaluations are whole."""
    assert loop.run_logger.versions == [*range(1, loop.num_steps + 1)]
    rows = loop.trained_rows()
    assert len(rows) == len(set(rows)), "a rollout was trained on twice"
    by_step = Counter(batch.version for batch in loop.batches for _ in batch.rows)
    whole = loop.groups_per_step * loop.rollouts_per_prompt
    assert by_step == dict.fromkeys(range(loop.num_steps), whole)
    assert max(loop.staleness(), default=0) <= loop.max_staleness
    if loop.late == "wait":
        assert not loop.masked()
    outcomes = {row: found["outcome"] for row, found in loop.storage.outcomes.items()}
    assert {row for row, outcome in outcomes.items() if outcome == "trained"} == {*rows}
    assert loop.prompt_of.keys() <= outcomes.keys(), "a rollout without an outcome"
    assert not len(loop.storage._table), "rows were left in storage"
    evaluated = [each.version for each in loop.run_logger.evaluations]
    assert evaluated == sorted({*evaluated})
    assert {each.num_prompts for each in loop.run_logger.evaluations} <= {loop.num_held_out}
    assert not loop.num_held_out or evaluated[-1] == loop.num_steps


@searched(few=100, many=4000)
def test_no_combination_of_options_and_faults_breaks_a_promise(seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        chosen = options(rng)
        can_heal = not chosen["is_colocated"]
        faults = faults_of(rng, chosen["num_replicas"]) if can_heal and rng.random() < 0.7 else {}
        loop = Loop(**chosen, faults=faults)
        with case(seed), tempfile.TemporaryDirectory() as folder:
            run(perform(loop, rng, Path(folder), can_heal and rng.random() < 0.4))
            check(loop)
