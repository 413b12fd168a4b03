"""Changes of a recipe that shorten its step: the next best one, and other splits of its GPUs.

A change that is named fits, and was simulated; the others were only estimated, from their effect on
the work of each side."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from llamarl.controller.memory import DOUBLE, changed
from llamarl.core.config import Config
from llamarl.core.device.names import is_gpu
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import NextChange, Split, StepForecast
from llamarl.planner.law import generator_times, hardware_costs
from llamarl.planner.one_side import forecast_trainer_alone
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import fewest_steps, simulate
from llamarl.planner.simulation.workload import make_workload

Fits = Callable[[Config], bool]
MAX_SIMULATED = 2
LEAST_GAIN = 0.02  # of the step
NUM_NEIGHBOURS = 2  # splits tried on either side of the best estimate
CHANGES: tuple[tuple[str, object], ...] = (
    ("trainer.activation_checkpointing", "selective"),
    ("trainer.activation_checkpointing", "none"),
    ("trainer.compile", "inductor"),
    ("trainer.tokens_per_micro_batch", DOUBLE),
    ("generator.quantization", "fp8"),
    ("generator.kv_cache_dtype", "fp8"),
    ("generator.max_num_seqs", DOUBLE),
    ("staleness.max_staleness", DOUBLE),
)


def next_change(
    config: Config, architecture: Architecture, step: StepForecast, fits: Fits
) -> NextChange | None:
    """Return the best change found; None if none is worth it, and with pools. `step` is the
    recipe's."""
    if config.generator.pools:
        return None
    before = _work(config, architecture)
    estimates = []
    for words, other in _changed(config, step):
        if other != config:
            after = _work(other, architecture)
            estimates.append((_estimate_s(config, other, step, before, after), words, other))
    best: NextChange | None = None
    num_simulated = 0
    for estimate_s, words, other in sorted(estimates, key=lambda each: each[0]):
        bar_s = step.step_s * (1 - LEAST_GAIN) if best is None else best.step.step_s
        if estimate_s >= bar_s or num_simulated == MAX_SIMULATED:
            break
        if fits(other):
            num_simulated += 1
            costs = hardware_costs(other, architecture)
            found = simulate(other, architecture, costs, num_steps=fewest_steps(other))
            if found.step_s < bar_s:
                best = NextChange(words=words, step=found)
    return best


def _changed(config: Config, step: StepForecast) -> Iterator[tuple[str, Config]]:
    """Yield recipes with one change each, and the change in words."""
    for name, change in CHANGES:
        if name.startswith("generator") and not is_gpu(config.generator.device):
            continue
        with suppress(ValueError, AttributeError):  # no recipe, or a field of another engine
            found = changed(config, name, change)
            yield f"{name}={attrgetter(name)(found)}", found
    if not config.placement.colocated:
        for split in _nearby_splits(config, step, 0):
            ranks, replicas = split.trainer.num_ranks, split.generator.num_replicas
            yield f"trainer.num_ranks={ranks} generator.num_replicas={replicas}", split


def _work(config: Config, architecture: Architecture) -> tuple[float, float]:
    """Return the work of each side alone: the seconds of an optimizer step, and of a token of a
    full replica divided by the number of replicas."""
    generator, workload = config.generator, make_workload(config)
    context = workload.prompt_tokens + sum(workload.lengths) // (2 * len(workload.lengths))
    rows, costs = generator.max_num_seqs, Costs(**generator_times(config, architecture))
    if costs.kv_tokens:
        rows = max(1, min(rows, costs.kv_tokens // context))
    of_step = config.trainer.groups_per_step * config.sampling.rollouts_per_prompt
    rows = max(1, min(rows, of_step // generator.num_replicas))
    token_s = costs.decode_s(rows, rows * context) / rows / generator.num_replicas
    return forecast_trainer_alone(config, architecture).step_s, token_s


def _estimate_s(
    config: Config,
    other: Config,
    step: StepForecast,
    before: tuple[float, float],
    after: tuple[float, float],
) -> float:
    """Estimate the seconds of a changed recipe's step, with both sides' busy time in proportion to
    their work. The time that the recipe's step takes beyond its busier side, or beyond both where
    they take turns, stays, unless the change lets generators run further ahead."""
    busy = [step.busy_shares.get(name, 0.0) * step.step_s for name in ("trainer", "generator")]
    count = sum if config.placement.colocated else max
    busy_s = count(each * new / old for each, new, old in zip(busy, after, before, strict=True))
    is_ahead = other.staleness.max_staleness > config.staleness.max_staleness
    return busy_s + (0.0 if is_ahead else step.step_s - count(busy))


def best_splits(
    config: Config,
    step: StepForecast,
    step_of: Callable[[Config, int], StepForecast],
    fits: Fits,
) -> tuple[Split, ...]:
    """Return divisions of the recipe's GPUs, layouts of a trainer rank and a replica kept, the best
    first: the recipe's own and those near where both sides would be equally busy. `step_of`
    simulates each with as many steps as it needs."""
    found = [
        Split(
            num_trainer_ranks=candidate.trainer.num_ranks,
            num_replicas=candidate.generator.num_replicas,
            step_s=step_of(candidate, fewest_steps(candidate)).step_s,
        )
        for candidate in _nearby_splits(config, step, NUM_NEIGHBOURS)
        if candidate == config or fits(candidate)
    ]
    return tuple(sorted(found, key=lambda each: each.step_s))


def _nearby_splits(config: Config, step: StepForecast, num_neighbours: int) -> list[Config]:
    """Return the recipe's own split, and those around the one that gives each side GPUs in
    proportion to the GPU time that it was busy in `step`, in the smallest steps that keep whole
    hosts, whole replicas and the trainer's mesh."""
    trainer, generator = config.trainer, config.generator
    num_generator_ranks = generator.num_replicas * generator.num_ranks
    num_gpus = trainer.num_ranks + num_generator_ranks
    trained = step.busy_shares.get("trainer", 0.0) * trainer.num_ranks
    generated = step.busy_shares.get("generator", 0.0) * num_generator_ranks
    per_host = config.cluster.num_gpus_per_host if is_gpu(trainer.device) else 1
    unit = max(trainer.tensor_parallel * trainer.replicate, generator.num_ranks)
    if num_gpus > 2 * per_host:
        unit = max(unit, per_host)
    width = max(1, num_gpus // unit // 16) * unit
    middle = round(num_gpus * trained / (trained + generated) / width) * width
    wanted = {middle + i * width for i in range(-num_neighbours, num_neighbours + 1)}
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
