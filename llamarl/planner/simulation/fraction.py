"""A cluster that is a fraction of a large one, for simulations that would take minutes.

Owns: when a fraction may stand for the cluster, and what it consists of. Does not own: times or the
simulation. Invariant: each replica, trainer rank and host does as much as in the whole cluster, so
a step takes as long, and k times fewer tokens are trained in it.

One k-th of the replicas, the trainer's data ranks and the groups of a step, with costs of the
whole cluster. What is not the same: lengths are drawn again, and the slowest of fewer replicas and
ranks is a little faster. At 4096 GPUs with 65,536 rollouts a step (k = 16) a synchronous step came
out 1.7 % shorter than that of the whole, one with max_staleness 4 0.2 %.
"""

import math
from dataclasses import replace

from llamarl.core.config import Config
from llamarl.planner.simulation.costs import Costs
from llamarl.publish.publisher import TURN_REPLICAS

FEWEST_ROLLOUTS = 4096  # of a step that are simulated
FEWEST_RANKS = 8  # trainer ranks among which the slowest is looked for
TURN_SLACK = 0.2  # by which the number of replicas that commit one after the other may change,
AHEAD_SLACK = 0.5  # and where no replica waits for a version


def divisor(config: Config, costs: Costs, fewest_rollouts: int = FEWEST_ROLLOUTS) -> int:
    """The largest k so that a k-th of the cluster will do; 1 if it is small, does not divide or has
    pools."""
    num_rollouts = config.trainer.groups_per_step * config.sampling.rollouts_per_prompt
    found = [
        k
        for k in range(1, num_rollouts // fewest_rollouts + 1)
        if all(size % k == 0 for size in _sizes(config)) and _is_like(config, k)
    ]
    return max(found, default=1) if not costs.num_cores and not config.generator.pools else 1


def take(config: Config, costs: Costs, k: int) -> tuple[Config, Costs]:
    """A k-th of everything, and its costs."""
    if k == 1:
        return config, costs
    trainer, generator = config.trainer, config.generator
    part = replace(
        config,
        trainer=replace(
            trainer,
            num_ranks=trainer.num_ranks // k,
            replicate=1,
            groups_per_step=trainer.groups_per_step // k,
        ),
        generator=replace(generator, num_replicas=generator.num_replicas // k),
    )
    # One scorer and one reference serve all: what is left of them is so much slower.
    names = ("score_row_s", "infer_token_s", "infer_square_s")
    slower = {name: getattr(costs, name) * k for name in names}
    return part, replace(costs, **slower)


def _sizes(config: Config) -> tuple[int, ...]:
    """What must be divided."""
    trainer, generator = config.trainer, config.generator
    per_host = max(1, config.cluster.num_gpus_per_host // generator.num_ranks)
    num_hosts = generator.num_replicas // per_host if generator.num_replicas % per_host == 0 else 1
    return num_hosts, trainer.num_data_ranks, trainer.groups_per_step


def _is_like(config: Config, k: int) -> bool:
    """Whether turns of commits and the trainer's slowest rank are much the same in a k-th."""
    replicas = config.generator.num_replicas
    turn, turn_left = _turn(replicas), _turn(replicas // k)
    num_ranks = config.trainer.num_data_ranks
    is_wide = num_ranks // k >= min(num_ranks, FEWEST_RANKS)
    slack = AHEAD_SLACK if config.staleness.max_staleness else TURN_SLACK
    return is_wide and abs(turn_left - turn) <= slack * turn


def _turn(num_replicas: int) -> int:
    """Replicas that commit one after the other."""
    return math.ceil(num_replicas / math.ceil(num_replicas / TURN_REPLICAS)) if num_replicas else 0
