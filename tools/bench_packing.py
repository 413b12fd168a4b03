"""How evenly the ranks of a trainer are loaded: `pack` against two ways that balance whole ranks.

    python tools/bench_packing.py [--json FILE] [--seeds 8]

1024 rollouts with a prompt of 200 tokens and log-normal responses, trained on 4, 8 and 64 ranks in
micro-batches of a limited number of tokens. A rollout of l tokens is taken to cost l + a * l**2,
with `a` of Llama 3.1 8B. The ways are

    tokens  the longest first to the rank with fewest tokens, then cut into micro-batches
    cost    ranks balanced by cost with the method of Karmarkar and Karp, then cut
    pack    what llamarl does: balanced within each round of micro-batches

`spread` is the costliest rank minus the cheapest, over the mean; `waits` is the time in which the
slowest rank of each micro-batch is waited for, over the time of the work: the ranks meet at the
gathers of every micro-batch. Figures are means over the seeds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

from harness import ROOT, Bench, Values, means

from llamarl.data.packing import Assignment, pack
from llamarl.data.partition import partition
from llamarl.models.architecture import read_architecture
from llamarl.models.inventory import attention_cost

ARCHITECTURE = ROOT / "recipes" / "llama31_8b_math" / "architecture"
SQUARE = attention_cost(read_architecture(ARCHITECTURE))
PROMPT_TOKENS = 200
NUM_ROLLOUTS = 1024
SHAPES = [  # median and spread of the response, its limit, tokens per micro-batch
    (400, 0.8, 4096, 8192),
    (2000, 1.0, 16384, 32768),
    (4000, 1.2, 65536, 65736),
]


def draw_lengths(seed: int, median: float, spread: float, most: int) -> list[int]:
    """Tokens of each rollout, prompt included."""
    drawn = random.Random(seed)
    responses = [round(median * drawn.lognormvariate(0, spread)) for _ in range(NUM_ROLLOUTS)]
    return [PROMPT_TOKENS + min(most, max(1, response)) for response in responses]


def costs_of(lengths: Sequence[int]) -> list[float]:
    """In units of a token without attention."""
    return [length + SQUARE * length * length for length in lengths]


def cut(ranks: list[list[int]], lengths: Sequence[int], budget: int) -> Assignment:
    """Each rank's rollouts, the longest first, in runs of at most `budget` tokens."""
    found: list[list[tuple[int, ...]]] = []
    for positions in ranks:
        runs: list[list[int]] = []
        room = 0
        for position in sorted(positions, key=lambda i: (-lengths[i], i)):
            if lengths[position] > room or not runs:
                runs.append([])
                room = budget
            runs[-1].append(position)
            room -= lengths[position]
        found.append([tuple(run) for run in runs])
    most = max(map(len, found))
    return tuple((*runs, *[()] * (most - len(runs))) for runs in found)


def by_tokens(lengths: Sequence[int], num_ranks: int, budget: int) -> Assignment:
    """Ranks balanced by tokens, the longest rollout first."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        ranks[rank].append(position)
        loads[rank] += lengths[position]
    return cut(ranks, lengths, budget)


def by_cost(lengths: Sequence[int], num_ranks: int, budget: int) -> Assignment:
    """Ranks balanced by cost, by differencing."""
    return cut(partition(costs_of(lengths), num_ranks), lengths, budget)


def by_rounds(lengths: Sequence[int], num_ranks: int, budget: int) -> Assignment:
    """What llamarl does."""
    return pack(lengths, num_ranks, budget, SQUARE)


WAYS = {"tokens": by_tokens, "cost": by_cost, "pack": by_rounds}


def spread(assignment: Assignment, costs: Sequence[float]) -> float:
    """The costliest rank minus the cheapest, over the mean."""
    loads = [sum(costs[i] for batch in rank for i in batch) for rank in assignment]
    return (max(loads) - min(loads)) / statistics.mean(loads)


def waits(assignment: Assignment, costs: Sequence[float]) -> float:
    """What all ranks wait for the slowest of each micro-batch, over the work of a rank."""
    rounds = zip(*assignment, strict=True)
    slowest = sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)
    return slowest * len(assignment) / sum(costs) - 1


def measure(
    way: Callable[[Sequence[int], int, int], Assignment],
    shape: tuple[float, float, int, int],
    num_ranks: int,
    seeds: range,
) -> list[Values]:
    """Of each seed."""
    found = []
    for seed in seeds:
        lengths = draw_lengths(seed, *shape[:3])
        start_s = time.perf_counter()
        assignment = way(lengths, num_ranks, shape[3])
        took_ms, costs = (time.perf_counter() - start_s) * 1e3, costs_of(lengths)
        found.append(
            {
                "spread": spread(assignment, costs),
                "waits": waits(assignment, costs),
                "micro_batches": len(assignment[0]),
                "took_ms": took_ms,
            }
        )
    return found


def main() -> None:
    """Measure all."""
    bench = Bench(__doc__)
    bench.option("--seeds", type=int, default=8)
    arguments, rounds = bench.parse(), {}
    for shape, num_ranks, (name, way) in product(SHAPES, (4, 8, 64), WAYS.items()):
        case = f"{shape[0]} tokens, {shape[3]} a micro-batch, {num_ranks} ranks, {name}"
        rounds[case] = measure(way, shape, num_ranks, range(arguments.seeds))
        bench.add_all(means(rounds[case]), case)
    bench.write(rounds)


if __name__ == "__main__":
    main()
