"""What cheaper GPUs for generation are worth: throughput per cost in the planner's simulator.

    python tools/bench_pools.py --json FILE

StreamRL (arXiv 2504.15930) trains Qwen2.5 of 7B, 32B and 72B on H800 and generates on 32 H20 of a
second site, answers of at most 10,000 and 20,000 tokens, and publishes 1.23 to 1.33 times the
throughput per cost of H800 alone. Prices are the paper's (llamarl/planner/hardware.py).

Of both kinds of cluster the best is compared. With H20: 32 of them, and as many H800 as train best.
Without: as many H800 for the trainer as that, and as many as generate best. Both run one step
ahead, with dynamic parts, on equal rollouts. "Best" is throughput per cost, among the split that
balances both sides and its neighbours (StreamRL's Algorithm 1 balances).

The paper states neither lengths nor batch sizes, and it trains PPO: figures are for two sizes of a
step, and bands over `CASES`, in which the trainer has 1, 2 or 4 times its forecast work. PPO's
critic doubles it, and public measurements of trainers are 1.3 to 2.3 times as long as our
forecasts. A link between sites counts as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from harness import Bench
from streams_bench.simulated import NUM_GPUS, QWEN_72B, Case, recipe

from llamarl.config import Config
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import StepForecast
from llamarl.planner.hardware import cost_of, gpu
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_bytes, kv_bytes
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import fewest_steps, simulate
from llamarl.planner.simulation.trainer_times import sizes
from llamarl.planner.simulation.workload import make_workload

TRAINS, GENERATES = "H800-80GB", "H20-96GB"
NUM_H20 = 32
PUBLISHED = (1.23, 1.33)
STATE_BYTES = 16  # of a parameter: weights, gradients and both moments in float32
TENSOR = 8  # trainer ranks, in which its size grows


@dataclass(frozen=True)
class Model:
    """A model, and the GPUs that one replica of it takes."""

    architecture: Architecture
    num_ranks: int

    @property
    def fewest_trainer_ranks(self) -> int:
        """Whose memory is at most half full of its state."""
        room = gpu(TRAINS).memory_bytes / 2
        num_bytes = STATE_BYTES * sizes(self.architecture).total
        return TENSOR * math.ceil(num_bytes / room / TENSOR)


QWEN_32B = replace(QWEN_72B, hidden_size=5120, intermediate_size=27648, num_layers=64, num_heads=40)
QWEN_7B = replace(
    QWEN_72B,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
)
MODELS = {"7B": Model(QWEN_7B, 1), "32B": Model(QWEN_32B, 2), "72B": Model(QWEN_72B, 4)}
CAPS = (10_000, 20_000)
SHAPES = ((0.1, 1.1), (0.25, 0.7))  # median over the cap, spread
WORK = (1, 2, 4)  # of the trainer, times its forecast
CASES = [*product(SHAPES, WORK)]


@dataclass(frozen=True)
class Found:
    """A cluster and what it does: GPUs that train and that generate, tokens per unit of price."""

    trainer: int
    generators: int
    step_s: float
    per_cost: float
    work: float
    """The trainer's GPU time over the generators'."""


@dataclass(frozen=True)
class Setup:
    """What is trained: answers of at most `cap` tokens, whose median is `median_share` of that."""

    model: Model
    cap: int
    median_share: float
    spread: float
    work: int
    groups_per_step: int


def cluster(setup: Setup, num_ranks: int, num_generators: int) -> Config:
    """A recipe for so many trainer ranks and generator ranks of one kind of GPU."""
    model, cap = setup.model, setup.cap
    case = Case(round(setup.median_share * cap), setup.spread, setup.groups_per_step)
    base = recipe(case, NUM_GPUS // 2, "dynamic", 1)
    return replace(
        base,
        sampling=replace(base.sampling, max_tokens=cap),
        experience=replace(base.experience, sampler="group_complete"),
        generator=replace(
            base.generator,
            num_ranks=model.num_ranks,
            num_replicas=num_generators // model.num_ranks,
            max_model_len=cap + 1024,
        ),
        trainer=replace(
            base.trainer,
            num_ranks=num_ranks,
            tensor_parallel=min(TENSOR, model.architecture.num_kv_heads),
        ),
        cluster=replace(base.cluster, num_hosts=128, gpu=TRAINS),
    )


def num_slots(config: Config, architecture: Architecture, kind: str) -> int:
    """Rollouts that the KV cache of a replica holds on average, at most its share of a step."""
    workload = make_workload(config)
    lengths = np.array(workload.lengths, dtype=float)
    context = workload.prompt_tokens + float((lengths**2).mean() / lengths.mean()) / 2
    device = gpu(kind)
    room = device.memory_bytes - device.reserve_bytes - generator_bytes(config, architecture)
    most = config.trainer.groups_per_step * config.sampling.rollouts_per_prompt
    share = math.ceil(most / config.generator.num_replicas)
    return max(1, min(share, int(room / (kv_bytes(config, architecture) * context))))


def on(config: Config, architecture: Architecture, kind: str) -> Config:
    """The recipe with all replicas on this kind of GPU."""
    slots = num_slots(config, architecture, kind)
    replicas = config.generator.num_replicas
    pools = [f"num_replicas={replicas} max_num_seqs={slots} gpu={kind}"]
    return replace(config, generator=replace(config.generator, num_replicas=1, pools=pools))


def worked(costs: Costs, times: int) -> Costs:
    """The costs with so many times the work in the trainer."""
    names = ("token_s", "square_s", "hidden_s", "micro_batch_s", "optimizer_s")
    return replace(costs, **{name: times * getattr(costs, name) for name in names})


def run(config: Config, architecture: Architecture, times: int) -> Found:
    """Simulate it."""
    costs, cost = worked(hardware_costs(config, architecture), times), cost_of(config)
    assert cost is not None
    step: StepForecast = simulate(config, architecture, costs, num_steps=fewest_steps(config))
    trainer = config.trainer.num_ranks
    generators = config.generator.num_replicas * config.generator.num_ranks
    busy = step.busy_shares
    return Found(
        trainer=trainer,
        generators=generators,
        step_s=step.step_s,
        per_cost=cost.throughput(step.trained_tokens_per_s),
        work=busy["trainer"] * trainer / (busy["generator"] * generators),
    )


def compare(setup: Setup) -> dict[str, Any]:
    """The best cluster with H20 and the best without."""
    architecture, least = setup.model.architecture, setup.model.fewest_trainer_ranks

    def simulated(num_trainers: int, num_generators: int, kind: str) -> Found:
        config = on(cluster(setup, num_trainers, num_generators), architecture, kind)
        return run(config, architecture, setup.work)

    def around(balance: float, unit: int, fewest: int) -> set[int]:
        below = math.floor(balance / unit) * unit
        return {max(fewest, below), max(fewest, below + unit)}

    def best(*found: Found) -> Found:
        return max(found, key=lambda each: each.per_cost)

    first = simulated(max(least, NUM_H20), NUM_H20, GENERATES)
    wanted = around(first.work * NUM_H20, TENSOR, least)
    mixed = best(first, *(simulated(n, NUM_H20, GENERATES) for n in wanted))
    first = simulated(mixed.trainer, NUM_H20, TRAINS)
    unit = max(setup.model.num_ranks, 4)
    wanted = around(mixed.trainer / first.work, unit, unit)
    same = best(first, *(simulated(mixed.trainer, n, TRAINS) for n in wanted))
    return {
        "work": setup.work,
        "median_share": setup.median_share,
        "mixed": vars(mixed),
        "same": vars(same),
        "gain": mixed.per_cost / same.per_cost,
    }


def main() -> None:
    bench = Bench(__doc__)
    bench.option("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    bench.option(
        "--groups", type=int, nargs="*", default=[64, 256], help="groups of a step, of 16 answers"
    )
    bench.option("--quick", action="store_true", help="one case of the shorter answers")
    args, rounds = bench.parse(), {}
    caps, cases = (CAPS[:1], CASES[:1]) if args.quick else (CAPS, CASES)
    bench.add("published", None, "StreamRL", PUBLISHED)
    for name, cap, groups in product(args.models, caps, args.groups):
        setup = f"{name} {cap // 1000}k, {groups} groups"
        found = [compare(Setup(MODELS[name], cap, *shape, work, groups)) for shape, work in cases]
        rounds[setup] = found
        for kind in ("mixed", "same") if args.quick else ():
            bench.add_all(found[0][kind], f"{setup}, {kind}")
        for times in WORK:
            if gains := [each["gain"] for each in found if each["work"] == times]:
                value = None if len(gains) > 1 else gains[0]
                bench.add(f"gain_trainer_x{times}", value, setup, gains)
    bench.write(rounds)


if __name__ == "__main__":
    main()
