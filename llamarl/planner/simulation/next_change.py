"""The change of a recipe that shortens its step most.

Owns: which changes are looked at, and how the best one is found. Does not own: times
(`roofline.py`, `simulated_run.py`) or memory (`memory/`). Invariant: a change that is named fits,
and was simulated; the others were only estimated, from what it does to the work of each side."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from llamarl.core.config import Config
from llamarl.core.device.names import is_gpu
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import StepForecast, Variant
from llamarl.planner.simulation.baselines import simulated
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.generator_times import generator_times
from llamarl.planner.simulation.single import forecast_trainer_alone
from llamarl.planner.simulation.variants import best_share, nearby_splits
from llamarl.planner.simulation.workload import make_workload

MAX_SIMULATED = 2
LEAST_GAIN = 0.02  # of the step
CHANGES: tuple[tuple[str, str, Any], ...] = (  # section, field, value or factor
    ("trainer", "activation_checkpointing", "selective"),
    ("trainer", "activation_checkpointing", "none"),
    ("trainer", "compile", "inductor"),
    ("trainer", "tokens_per_micro_batch", 2.0),
    ("generator", "quantization", "fp8"),
    ("generator", "kv_cache_dtype", "fp8"),
    ("generator", "max_num_seqs", 2.0),
    ("staleness", "max_staleness", 2.0),
)


def next_change(
    config: Config,
    architecture: Architecture,
    step: StepForecast,
    fits: Callable[[Config], bool],
) -> Variant | None:
    """The best one found; None if none is worth it. `step` is the recipe's."""
    if config.generator.pools or config.placement.colocated:
        return None
    before = _work(config, architecture)
    estimates = []
    for words, changed in _changed(config, step):
        if changed != config:
            after = _work(changed, architecture)
            estimates.append((_estimate_s(config, changed, step, before, after), words, changed))
    best: Variant | None = None
    num_simulated = 0
    for estimate_s, words, changed in sorted(estimates, key=lambda each: each[0]):
        bar_s = step.step_s * (1 - LEAST_GAIN) if best is None else best.step.step_s
        if estimate_s >= bar_s or num_simulated == MAX_SIMULATED:
            break
        if fits(changed):
            num_simulated += 1
            found = simulated(words, changed, architecture)
            if found.step.step_s < bar_s:
                best = found
    return best


def _changed(config: Config, step: StepForecast) -> Iterator[tuple[str, Config]]:
    """Recipes with one change each, and what it is."""
    for section, name, value in CHANGES:
        part = getattr(config, section)
        old = getattr(part, name, None)
        if old is None or (section == "generator" and not is_gpu(part.device)):
            continue
        new = max(1, int(old * value)) if isinstance(value, float) else value
        try:
            changed = replace(config, **{section: replace(part, **{name: new})})
        except ValueError:  # no recipe
            continue
        yield f"{section}.{name}={new}", changed
    num_gpus = config.trainer.num_ranks + config.generator.num_replicas * config.generator.num_ranks
    for split in nearby_splits(config, num_gpus, best_share(config, step), 0):
        ranks, replicas = split.trainer.num_ranks, split.generator.num_replicas
        yield f"trainer.num_ranks={ranks} generator.num_replicas={replicas}", split


def _work(config: Config, architecture: Architecture) -> tuple[float, float]:
    """(seconds of an optimizer step alone, of a token of a full replica over all replicas)."""
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
    changed: Config,
    step: StepForecast,
    before: tuple[float, float],
    after: tuple[float, float],
) -> float:
    """The step with both sides' busy time in proportion to their work; what the recipe's step takes
    beyond its busier side stays, unless the change lets generators run further ahead."""
    busy = [step.busy_shares.get(name, 0.0) * step.step_s for name in ("trainer", "generator")]
    longer_s = max(each * new / old for each, new, old in zip(busy, after, before, strict=True))
    is_ahead = changed.staleness.max_staleness > config.staleness.max_staleness
    return longer_s + (0.0 if is_ahead else step.step_s - max(busy))
