"""The same workload run otherwise: what each difference is worth, and the best split of the GPUs.

Owns: the configurations that a recipe is compared with, the decomposition of its gain, LlamaRL's
argument about memory and the search for the best split. Does not own: times (`costs.py`,
`simulated_run.py`) or memory (`memory/`). Invariant: every variant has the recipe's rollouts and
lengths, uses no more GPUs, and runs in the same simulator.

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

from llamarl.core.config import Config
from llamarl.core.device.names import is_gpu
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import BestSplit, Decomposition, Split, StepForecast, Variant
from llamarl.planner.hardware import gpu
from llamarl.planner.simulation.baselines import simulated
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_bytes, kv_bytes
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import fewest_steps, simulate

CostsOf = Callable[[Config, Architecture], Costs]
NUM_NEIGHBOURS = 2  # candidates on either side of theta*


def decompose(
    config: Config, architecture: Architecture, *, baseline: Variant, step: StepForecast
) -> Decomposition:
    """What overlap, batch sizes with degree, and precision are each worth on the way from
    `baseline` to the recipe, whose own step is `step`."""
    recipe = Variant(words="the recipe", config=config, step=step)
    wide = _unquantized(config, architecture)
    words = f"the recipe with a generator in {config.generator.dtype}"
    is_plain = wide == config
    variant = replace(recipe, words=words) if is_plain else simulated(words, wide, architecture)
    stages = {
        "overlap": _overlapped(config, baseline, architecture),
        "batch_and_degree": variant,
        "precision": recipe,
    }
    return Decomposition(baseline=baseline, stages=stages)


def _overlapped(config: Config, baseline: Variant, architecture: Architecture) -> Variant:
    """The baseline's degree and batch sizes, on the best split of the GPUs, as far ahead as the
    recipe; the baseline itself if each side would need all GPUs."""
    num_gpus = baseline.config.trainer.num_ranks
    generator, trainer = baseline.config.generator, baseline.config.trainer
    unit = max(generator.num_ranks, trainer.tensor_parallel)
    ranks = "GPUs" if is_gpu(trainer.device) else "ranks"
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


def best_share(config: Config, step: StepForecast) -> float:
    """theta* = a / (a + c), with the GPU time that both sides of a simulated recipe were busy with
    per step: so many samples at the hardware's seconds for each."""
    generator = config.generator
    a = step.busy_shares.get("trainer", 0.0) * config.trainer.num_ranks
    c = step.busy_shares.get("generator", 0.0) * generator.num_replicas * generator.num_ranks
    return a / (a + c)


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
    share = best_share(config, forecast)
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
    per_host = config.cluster.num_gpus_per_host if is_gpu(trainer.device) else 1
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
