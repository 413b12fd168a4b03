"""What the controller costs at the scale of thousands of GPUs.

    python tools/bench_controller.py [--json FILE] [--replicas 256] [--trainer-ranks 2048]
        [--rollouts 16384] [--collectors 1] [--staleness 1] [--turns 0] [--conversations 1]
        [--actors 16] [--scaling]

First the CPU time of a message is measured on real Monarch actors in processes of their own, which
a worker daemon serves: a linear model per call and per byte; and what a call on 16 ranks costs, as
charged for replicas and trainer. What Monarch itself does to watch over processes is left out: it
is the more the more processes there are. The rest, pickling and unpickling the very arguments and
answers, is done and timed.

Then the real controller (stages, gate, dispatch, rollouts, packing, publisher, log-prob check, run
logger) runs with simulated executors on a virtual clock. Time stands still for what the executors
compute, and goes on for what the controller computes and for its messages: that is when they have
to wait.

`controller_core_share` is the share of one core that the controller needs; `controller_wait_share`
the share of the time in which the trainer stood without a call though all it needs for it was
known, or a replica had a free slot and no request since the trainer's answer that allowed it one.

`--scaling` simulates 32 to 1024 ranks instead, half of them the trainer's, with as many rollouts
per rank at every size. `scaling_efficiency` is the throughput per rank over that of 32 ranks;
executors themselves scale perfectly, so what is lost is what controller, messages, gate and the
tail of each batch cost. It also compares rollouts of 400 and of 3200 tokens: `load_by_length` is
the ratio of the controller's load, `bytes_by_length` that of its bytes per rollout.

With `--conversations` each rollout is an episode of so many conversations, one after another, as
programs of agents open them: each is a row of its own with a prompt of its own, and all together
have the tokens of a rollout. So a step is as long as without them, about 20 s (`step_s`), which is
what shares refer to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter, defaultdict

from controller_bench.charged import Load
from controller_bench.clock import CostClock
from controller_bench.messages import MessageCosts, measure
from controller_bench.simulation import Shape, run
from harness import Bench

SIZES = (32, 64, 128, 256, 512, 1024)  # ranks
COSTS_WITHOUT_MEASURING = MessageCosts(
    call_s=5e-4, sent_byte_s=5e-9, received_byte_s=5e-9, ranks_s=1e-3, num_actors=0
)


def simulate(shape: Shape, costs: MessageCosts) -> Load:
    """One run on a clock of its own, which alone looks for cycles."""
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=CostClock) as runner:
            return runner.run(run(shape, costs))
    finally:
        gc.enable()


def results(shape: Shape, costs: MessageCosts, load: Load) -> dict[str, object]:
    """Shares, and what they are made of, per step."""
    waits: dict[str, float] = defaultdict(float)
    for start_s, end_s, who in load.waits:
        waits[who] += (end_s - start_s) / load.num_steps
    num_rollouts = shape.num_rollouts * load.num_steps
    step_s = load.elapsed_s / load.num_steps
    busy_s = (load.cpu_s + load.message_s) / load.num_steps
    calls: Counter[str] = Counter()
    for name, count in load.calls.items():
        calls[name] = round(count / load.num_steps)
    return {
        "controller_core_share": busy_s / step_s,
        "controller_wait_share": load.waited_s() / load.elapsed_s,
        "bytes_per_rollout": load.num_bytes.total() / num_rollouts,
        "step_s": step_s,
        "own_cpu_s": load.cpu_s / load.num_steps,
        "message_cpu_s": load.message_s / load.num_steps,
        "calls": dict(calls),
        "bytes": {name: count // load.num_steps for name, count in load.num_bytes.most_common()},
        "waits_s": dict(waits),
        "busy_shares": load.busy_shares,
        "wait_shares": load.wait_shares,
        "message_costs": dataclasses.asdict(costs),
        "shape": dataclasses.asdict(shape),
    }


def shape_of(num_ranks: int, **more: int) -> Shape:
    """Half of the ranks are the trainer's, the others replicas of eight."""
    return Shape(
        num_replicas=num_ranks // 2 // 8,
        ranks_per_replica=8,
        num_trainer_ranks=num_ranks // 2,
        num_groups=num_ranks,
        **more,
    )


def scale(costs: MessageCosts) -> dict[str, object]:
    """The efficiency by number of ranks, and what longer rollouts cost the controller."""
    loads = {size: simulate(shape_of(size), costs) for size in SIZES}
    step_s = {size: load.elapsed_s / load.num_steps for size, load in loads.items()}
    short, long = loads[SIZES[-1]], simulate(shape_of(SIZES[-1], median_tokens=8 * 400), costs)

    def core_share(load: Load) -> float:
        return (load.cpu_s + load.message_s) / load.elapsed_s

    return {
        "scaling_efficiency": {size: step_s[SIZES[0]] / step_s[size] for size in SIZES},
        "core_share": {size: core_share(loads[size]) for size in SIZES},
        "load_by_length": core_share(long) / core_share(short),
        "bytes_by_length": long.num_bytes.total() / short.num_bytes.total(),
        "message_costs": dataclasses.asdict(costs),
    }


def main() -> None:
    """Measure and simulate."""
    bench = Bench(
        __doc__,
        {
            "controller_core_share": "<= 0.10",
            "controller_wait_share": "<= 0.01",
            "scaling_efficiency": ">= 0.9",
        },
    )
    bench.option("--replicas", type=int, default=256)
    bench.option("--trainer-ranks", type=int, default=2048)
    bench.option("--rollouts", type=int, default=16384, help="in a step, 16 of each prompt")
    bench.option("--collectors", type=int, default=1)
    bench.option("--staleness", type=int, default=1)
    turns = "of each episode or conversation; 0: there are none"
    bench.option("--turns", type=int, default=0, help=turns)
    bench.option("--conversations", type=int, default=1, help="of each episode; 1: no others")
    bench.option("--actors", type=int, default=16, help="0: assume what messages cost")
    bench.option("--scaling", action="store_true", help="from 32 to 1024 ranks instead")
    arguments = bench.parse()
    shape = Shape(
        num_replicas=arguments.replicas,
        num_trainer_ranks=arguments.trainer_ranks,
        num_groups=arguments.rollouts // 16,
        num_collectors=arguments.collectors,
        max_staleness=arguments.staleness,
        num_turns=arguments.turns,
        num_conversations=arguments.conversations,
    )
    costs = COSTS_WITHOUT_MEASURING
    if arguments.actors:
        costs = measure(arguments.actors, num_calls=320, num_rounds=5)
    found = scale(costs) if arguments.scaling else results(shape, costs, simulate(shape, costs))
    details = {name: found.pop(name) for name in ("shape", "message_costs") if name in found}
    for name, value in found.items():
        if isinstance(value, dict):
            for case, each in value.items():
                bench.add(name, each, f"{case} ranks" if isinstance(case, int) else case)
        else:
            bench.add(name, value)
    bench.write(details)


if __name__ == "__main__":
    main()
