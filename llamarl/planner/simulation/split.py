"""How many GPUs for the trainer, how many for the generators.

Owns: LlamaRL's argument about memory, and the search for the best split of a recipe. Does not own:
times (`costs.py`, `run.py`) or memory (`memory/`).
Invariant: a split uses no more GPUs than the recipe.

The argument: alternating on the same GPUs, trainer and generator share one memory budget and one
model-parallel degree m; apart, each has its own. With B samples per step, G GPUs of M bytes each, W
bytes of weights, kappa W of trainer state, A bytes of activations and K bytes of keys and values
per sample, eta_t(b) and eta_g(b) seconds per sample of one group of m ranks at batch b:

    T_sync  = min over b_t, b_g, m of (B m / G) (eta_t(b_t) + eta_g(b_g))
              with (kappa W + A b_t + W + K b_g) / m <= M
    T_async = min over b_t, b_g, m_t, m_g, theta of
              max(B m_t eta_t(b_t) / (theta G), B m_g eta_g(b_g) / ((1 - theta) G))
              with (kappa W + A b_t) / m_t <= M and (W + K b_g) / m_g <= M

For given a = m_t eta_t and c = m_g eta_g the trainer's best share is theta* = a / (a + c), and the
step (B / G) (a + c): every synchronous point is an asynchronous one with room left in both budgets.
The paper (arXiv 2505.24034) states the result; definitions and proof are our reconstruction.
"""

from collections.abc import Callable
from dataclasses import replace

from llamarl.config import Config
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import BestSplit, Split, StepForecast
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.run import fewest_steps, simulate

CostsOf = Callable[[Config, Architecture], Costs]
NUM_NEIGHBOURS = 2  # candidates on either side of theta*


def best_split(
    config: Config,
    architecture: Architecture,
    costs_of: CostsOf,
    *,
    fits: Callable[[Config], bool] = lambda config: True,
    num_neighbours: int = NUM_NEIGHBOURS,
) -> BestSplit:
    """The best division of the recipe's GPUs, layouts of a trainer rank and a replica kept.

    theta* and `num_neighbours` splits on either side of it are simulated with the real controller;
    `fits` says which may be.
    """
    num_steps = fewest_steps(config)
    forecast = simulate(config, architecture, costs_of(config, architecture), num_steps=num_steps)
    num_generator_ranks = config.generator.num_replicas * config.generator.num_ranks
    num_gpus = config.trainer.num_ranks + num_generator_ranks
    a = forecast.busy_shares["trainer"] * config.trainer.num_ranks
    c = forecast.busy_shares["generator"] * num_generator_ranks
    share = a / (a + c)
    found: list[tuple[Split, StepForecast]] = []
    for candidate in nearby_splits(config, num_gpus, share, num_neighbours):
        if candidate == config or fits(candidate):
            step = forecast
            if candidate != config:
                costs = costs_of(candidate, architecture)
                step = simulate(candidate, architecture, costs, num_steps=num_steps)
            split = Split(
                num_trainer_ranks=candidate.trainer.num_ranks,
                num_replicas=candidate.generator.num_replicas,
                step_s=step.step_s,
            )
            found.append((split, step))
    found.sort(key=lambda pair: pair[1].step_s)
    return BestSplit(
        best_share=share,
        candidates=tuple(split for split, _ in found),
        step=found[0][1] if found else None,
    )


def nearby_splits(config: Config, num_gpus: int, share: float, num_neighbours: int) -> list[Config]:
    """The recipe's own split and those around `share` of the GPUs for the trainer, in the smallest
    steps that keep whole hosts, whole replicas and the trainer's mesh."""
    trainer, generator = config.trainer, config.generator
    per_host = config.cluster.num_gpus_per_host if trainer.device == "cuda" else 1
    unit = max(trainer.tensor_parallel * trainer.replicate, generator.num_ranks)
    if num_gpus > 2 * per_host:
        unit = max(unit, per_host)
    step = max(1, num_gpus // unit // 16) * unit
    middle = round(num_gpus * share / step) * step
    wanted = {middle + i * step for i in range(-num_neighbours, num_neighbours + 1)}
    found = []
    for num_ranks in sorted(wanted | {trainer.num_ranks}):
        num_replicas = (num_gpus - num_ranks) // generator.num_ranks
        is_mesh = num_ranks % (trainer.tensor_parallel * trainer.replicate) == 0
        if num_ranks < 1 or num_replicas < 1 or not is_mesh:
            continue
        own = replace(trainer, num_ranks=num_ranks)
        others = replace(generator, num_replicas=num_replicas)
        found.append(replace(config, trainer=own, generator=others))
    return found
