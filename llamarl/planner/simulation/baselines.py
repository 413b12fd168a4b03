"""What a recipe is compared with: the same workload, synchronous and colocated.

Owns: the configurations of the baseline, the best one, the one that `plan.baseline` describes, and
those that a paper which states none of it may have run. Does not own: times (`simulated_run.py`) or
memory (`memory/`). Invariant: a baseline has the recipe's rollouts and lengths and uses no more
GPUs.

It is the published kind: trainer and generator in memory at once, one model-parallel degree for
both. Unless it is described it gets the degree and the batch sizes that are best for it among those
that fit; generator weights are counted once, without staging, in its favour.
"""

from collections.abc import Iterator
from dataclasses import replace

from llamarl.core.config import Config, EmbeddedConfig, TrainerConfig
from llamarl.core.config.plan_keys import Baseline, read_baseline
from llamarl.core.device.names import is_gpu
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import Decomposition, Variant
from llamarl.planner.hardware import gpu
from llamarl.planner.memory.trainer_memory import forecast_trainer
from llamarl.planner.simulation.generator_times import generator_bytes, kv_bytes
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import fewest_steps, simulate
from llamarl.planner.simulation.workload import make_workload

MAX_DEGREE = 32
NUM_BUDGETS = 3  # micro-batch budgets tried: the recipe's, a half, a quarter
UNSTATED = ((1, 64), (2, 16))
"""Degrees, over that of the best baseline, and rollouts decoded together: what a paper may have run
that states neither, in static batches without graphs."""


def synchronous(config: Config) -> Config:
    """The recipe on-policy: generators run ahead no further than to a whole batch."""
    least = config.trainer.steps_per_batch - 1
    return replace(config, staleness=replace(config.staleness, max_staleness=least))


def baseline_of(config: Config, architecture: Architecture) -> Variant | None:
    """The one that `plan.baseline` describes, or the fastest that fits; None if none does."""
    described = read_baseline(config.plan.baseline)
    if described is None:
        return best_baseline(config, architecture)
    return _described(config, architecture, described)


def unstated_baselines(
    config: Config, architecture: Architecture, gain: Decomposition | None
) -> tuple[Variant, ...]:
    """What a paper that describes no baseline may have compared itself with, besides the one of
    `gain`; () without that."""
    if gain is None:
        return ()
    best = gain.baseline.config
    own, most = best.generator, min(architecture.num_heads, best.trainer.num_ranks)
    found = []
    for factor, running in UNSTATED:
        degree = min(own.num_ranks * factor, most)
        described = Baseline(degree=degree, is_static=True, max_num_seqs=running, graphs=False)
        found.append(_described(config, architecture, described))
    return tuple(found)


def _described(config: Config, architecture: Architecture, described: Baseline) -> Variant:
    num_gpus = _num_gpus(config)
    found = _colocated(config, architecture, num_gpus, described.degree, 0)
    assert isinstance(found.generator, EmbeddedConfig)
    is_eager = not (described.graphs and is_gpu(found.generator.device))
    generator = replace(
        found.generator, max_num_seqs=described.max_num_seqs, enforce_eager=is_eager
    )
    algorithm = found.algorithm
    if described.has_reference and not algorithm.has_reference:
        algorithm = replace(algorithm, kl_coefficient=0.1)
    found = replace(
        found,
        generator=generator,
        algorithm=algorithm,
        placement=replace(found.placement, offload="pinned" if described.offloads else "none"),
        plan=replace(found.plan, static_batches=described.is_static),
    )
    return simulated(described.words, found, architecture)


def _num_gpus(config: Config) -> int:
    """Of trainer and generators together."""
    if config.placement.colocated:
        return config.trainer.num_ranks
    return config.trainer.num_ranks + config.generator.num_replicas * config.generator.num_ranks


def simulated(words: str, config: Config, architecture: Architecture) -> Variant:
    """With its step."""
    costs = hardware_costs(config, architecture)
    step = simulate(config, architecture, costs, num_steps=fewest_steps(config))
    return Variant(words=words, config=config, step=step)


def best_baseline(config: Config, architecture: Architecture) -> Variant | None:
    """The fastest synchronous, colocated configuration that fits; None if none does."""
    best: Variant | None = None
    for candidate in _baselines(config, architecture):
        generator, trainer = candidate.generator, candidate.trainer
        words = (
            f"synchronous and colocated, degree {generator.num_ranks}, {generator.max_num_seqs} "
            f"rollouts decoded together, {trainer.tokens_per_micro_batch} tokens per micro-batch"
        )
        found = simulated(words, candidate, architecture)
        if best is None or found.step.step_s < best.step.step_s:
            best = found
    return best


def _baselines(config: Config, architecture: Architecture) -> Iterator[Config]:
    """One per degree and micro-batch budget, each with all the concurrency that fits."""
    num_gpus = _num_gpus(config)
    device = gpu(config.cluster.planned_gpu, config.trainer.device)
    workload = make_workload(config)
    context = workload.prompt_tokens + sum(workload.lengths) / len(workload.lengths)
    num_groups = config.trainer.groups_per_step * config.trainer.num_mini_batches
    num_rollouts = num_groups * config.sampling.rollouts_per_prompt
    for degree in (1 << i for i in range(MAX_DEGREE.bit_length())):
        if num_gpus % degree:
            continue
        for halvings in range(NUM_BUDGETS):
            candidate = _colocated(config, architecture, num_gpus, degree, halvings)
            moments = forecast_trainer(candidate, architecture).moments
            room = device.memory_bytes - device.reserve_bytes
            room -= max(sum(kinds.values()) for kinds in moments)
            room -= int(generator_bytes(candidate, architecture))
            num_running = int(room / (kv_bytes(candidate, architecture) * context))
            most = max(1, num_rollouts * degree // num_gpus)
            if num_running >= 1:
                running = min(num_running, most)
                generator = replace(candidate.generator, max_num_seqs=running)
                yield replace(candidate, generator=generator)
            if num_running >= most:
                break  # a smaller micro-batch would make room for nothing


def _colocated(
    config: Config, architecture: Architecture, num_gpus: int, degree: int, halvings: int
) -> Config:
    """One layout for both roles: generators of `degree` ranks, tensor parallel in the trainer as
    far as a host and the key-value heads allow."""
    tensor = min(degree, config.cluster.num_gpus_per_host, architecture.num_kv_heads)
    generator = EmbeddedConfig(
        num_replicas=num_gpus // degree,
        num_ranks=degree,
        device=config.generator.device,
        dtype=config.generator.dtype,
        max_num_seqs=config.generator.max_num_seqs,
        max_model_len=config.generator.max_model_len,
    )
    trainer = replace(
        TrainerConfig(**vars(config.trainer)),  # the native one: it alone has tensor parallel
        num_ranks=num_gpus,
        tensor_parallel=tensor,
        replicate=1,
        tokens_per_micro_batch=max(1, config.trainer.tokens_per_micro_batch >> halvings),
    )
    return replace(
        synchronous(config),
        generator=generator,
        trainer=trainer,
        placement=replace(config.placement, colocated=True, offload="none"),
        weights=replace(config.weights, staging="double_buffer"),
    )
