"""The same workload run otherwise, and what each difference is worth.

Owns: the configurations that a recipe is compared with, and the decomposition of its gain. Does
not own: times (`costs.py`, `run.py`) or memory (`memory/`). Invariant: every
variant has the recipe's GPUs, rollouts and lengths, and runs in the same simulator.

The baseline is the published kind: synchronous and colocated, trainer and generator in memory at
once, one model-parallel degree for both. It gets the degree and the batch sizes that are best for
it among those that fit; generator weights are counted once, without staging, in its favour.
"""

from collections.abc import Iterator
from dataclasses import replace

from llamarl.config import Config, EmbeddedConfig, TrainerConfig
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import Decomposition, StepForecast, Variant
from llamarl.planner.hardware import gpu
from llamarl.planner.memory.trainer import forecast_trainer
from llamarl.planner.simulation.roofline import generator_bytes, hardware_costs, kv_bytes
from llamarl.planner.simulation.run import fewest_steps, simulate
from llamarl.planner.simulation.split import best_split
from llamarl.planner.simulation.workload import make_workload

MAX_DEGREE = 32
NUM_BUDGETS = 3  # micro-batch budgets tried: the recipe's, a half, a quarter


def synchronous(config: Config) -> Config:
    """The recipe on-policy: generators do not run ahead."""
    return replace(config, staleness=replace(config.staleness, max_staleness=0))


def decompose(
    config: Config, architecture: Architecture, *, baseline: Variant, step: StepForecast
) -> Decomposition:
    """What overlap, batch sizes with degree, and precision are each worth on the way from
    `baseline` to the recipe, whose own step is `step`."""
    recipe = Variant(words="the recipe", config=config, step=step)
    wide = _unquantized(config, architecture)
    words = f"the recipe with a generator in {config.generator.dtype}"
    is_plain = wide == config
    variant = replace(recipe, words=words) if is_plain else _simulated(words, wide, architecture)
    stages = {
        "overlap": _overlapped(config, baseline, architecture),
        "batch_and_degree": variant,
        "precision": recipe,
    }
    return Decomposition(baseline=baseline, stages=stages)


def best_baseline(config: Config, architecture: Architecture) -> Variant | None:
    """The fastest synchronous, colocated configuration that fits; None if none does."""
    best: Variant | None = None
    for candidate in _baselines(config, architecture):
        generator, trainer = candidate.generator, candidate.trainer
        words = (
            f"synchronous and colocated, degree {generator.num_ranks}, {generator.max_num_seqs} "
            f"rollouts decoded together, {trainer.tokens_per_micro_batch} tokens per micro-batch"
        )
        found = _simulated(words, candidate, architecture)
        if best is None or found.step.step_s < best.step.step_s:
            best = found
    return best


def _baselines(config: Config, architecture: Architecture) -> Iterator[Config]:
    """One per degree and micro-batch budget, each with all the concurrency that fits."""
    num_gpus = config.trainer.num_ranks + config.generator.num_replicas * config.generator.num_ranks
    if config.placement.colocated:
        num_gpus = config.trainer.num_ranks
    device = gpu(config.cluster.planned_gpu, config.trainer.device)
    workload = make_workload(config)
    context = workload.prompt_tokens + sum(workload.lengths) / len(workload.lengths)
    num_rollouts = config.trainer.groups_per_step * config.sampling.rollouts_per_prompt
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
        weights=replace(config.weights, staging="bucket"),
    )


def _overlapped(config: Config, baseline: Variant, architecture: Architecture) -> Variant:
    """The baseline's degree and batch sizes, on the best split of the GPUs, as far ahead as the
    recipe; the baseline itself if each side would need all GPUs."""
    num_gpus = baseline.config.trainer.num_ranks
    generator, trainer = baseline.config.generator, baseline.config.trainer
    unit = max(generator.num_ranks, trainer.tensor_parallel)
    ranks = "GPUs" if trainer.device == "cuda" else "ranks"
    if num_gpus < 2 * unit:
        words = f"the same: {num_gpus} {ranks} cannot be split, for each side needs {unit}"
        return replace(baseline, words=words)
    num_ranks = max(1, num_gpus // 2 // unit) * unit
    num_replicas = max(1, (num_gpus - num_ranks) // generator.num_ranks)
    apart = replace(
        config,
        generator=replace(generator, num_replicas=num_replicas),
        trainer=replace(trainer, num_ranks=num_ranks),
        placement=replace(config.placement, colocated=False, offload="file"),
    )
    found = best_split(apart, architecture, hardware_costs, num_neighbours=1)
    best, step = found.candidates[0], found.step
    assert step is not None
    split = replace(
        apart,
        trainer=replace(apart.trainer, num_ranks=best.num_trainer_ranks),
        generator=replace(apart.generator, num_replicas=best.num_replicas),
    )
    words = (
        f"the same, asynchronous on {best.num_trainer_ranks} {ranks} for the trainer and "
        f"{best.num_replicas * generator.num_ranks} for generators"
    )
    return Variant(words=words, config=split, step=step)


def _unquantized(config: Config, architecture: Architecture) -> Config:
    """The recipe with plain generator weights: replicas get twice the ranks until they fit."""
    if config.generator.quantization == "none":
        return config
    generator = replace(config.generator, quantization="none")
    device = gpu(config.cluster.planned_gpu, generator.device)
    room = device.memory_bytes - device.reserve_bytes
    context = generator.max_model_len
    while generator.num_replicas > 1:
        wide = replace(config, generator=generator)
        needed = generator_bytes(wide, architecture)
        needed += kv_bytes(wide, architecture) * context * generator.max_num_seqs / 2
        if needed <= room:
            break
        twice = {name: 2 * getattr(generator, name) for name in ("num_ranks", "max_num_seqs")}
        generator = replace(generator, num_replicas=generator.num_replicas // 2, **twice)
    return replace(config, generator=generator)


def _simulated(words: str, config: Config, architecture: Architecture) -> Variant:
    costs = hardware_costs(config, architecture)
    step = simulate(config, architecture, costs, num_steps=fewest_steps(config))
    return Variant(words=words, config=config, step=step)
