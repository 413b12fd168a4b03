"""The forecast of one recipe, put together.

Owns: which questions `llamarl plan` asks, and the figures it writes as JSON. Does not own: any
answer (`memory/`, `simulation/`). Invariant: starts no process, and reads nothing but the
architecture and, if asked to, a finished run's folder.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from llamarl.core.config import Config, PlanConfig, rank_assignment
from llamarl.core.config.generator import pools_of
from llamarl.core.fields import require
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import (
    NO_MODELS,
    Decomposition,
    Forecast,
    FrozenModels,
    MemoryForecast,
    StepForecast,
)
from llamarl.planner.hardware import check_kinds, cost_of, timed
from llamarl.planner.memory.ranks import fits, forecast_memory, fullest
from llamarl.planner.report.bands import bands
from llamarl.planner.simulation.baselines import baseline_of, unstated_baselines
from llamarl.planner.simulation.calibration import Trace, fit_overhead, read_trace
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.next_change import next_change
from llamarl.planner.simulation.publish import forecast_publish
from llamarl.planner.simulation.roofline import hardware_costs
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.variants import best_share, best_split, decompose
from llamarl.planner.simulation.workload import with_lengths
from llamarl.trainer.advantages import EQUAL_REWARDS

T = TypeVar("T")

SYNC, ASYNC, COLOCATED = "sync", "async", "sync, colocated"


def forecast_recipe(
    config: Config,
    architecture: Architecture,
    *,
    frozen: FrozenModels = NO_MODELS,
    run_dir: str | None = None,
    sweep: bool = False,
    is_published: bool = False,
) -> Forecast:
    """Memory, publish and step time of `config`, beside the same workload run otherwise.

    Times come from hardware, or with `run_dir` from that finished run, whose layout is then the
    only one whose times are known. `frozen` models count in memory alone. `sweep` tries other
    splits of the processes between trainer and generators. Neither goes with pools. With
    `is_published` the baseline is varied over what the paper does not state. ValueError if
    the ranks do not fit onto the hosts, or the run lacks what is needed.
    """
    config = with_lengths(_check_known(config, run_dir, sweep))
    cost = cost_of(config)
    taken = {device for places in rank_assignment.assign(config).values() for device in places}
    trace = _calibrate(run_dir, config, architecture) if run_dir else None
    if trace is not None:
        config = replace(config, plan=_workload(config, trace))
    _check_workload(config, trace)
    publish = forecast_publish(config, architecture)

    def costs_of(config: Config, architecture: Architecture) -> Costs:
        return trace.costs if trace else hardware_costs(config, architecture)

    def simulate_recipe(config: Config) -> StepForecast:
        if trace is None:
            return simulate(config, architecture, hardware_costs(config, architecture, publish))
        return simulate(config, architecture, trace.costs, workload=trace.workload(config))

    has_room = partial(fits, architecture=architecture, frozen=frozen)
    step = simulate_recipe(config)
    name, other = _other_staleness(config)
    variants = {name: simulate_recipe(other)}
    is_apart = not config.placement.colocated
    gain = _gain(config, architecture, step) if trace is None else None
    if gain is not None:
        variants[COLOCATED] = gain.baseline.step
    is_varied = gain is not None and is_published and not config.plan.baseline
    return Forecast(
        num_hosts=len({device.host for device in taken}),
        num_gpus=len({device for device in taken if device.gpu is not None}),
        memory=forecast_memory(config, architecture, frozen),
        publish=publish,
        step=step,
        variants=variants,
        decomposition=gain,
        split=best_split(config, architecture, costs_of, fits=has_room) if sweep else None,
        measured_step_s=trace.step_s if trace else None,
        cost=cost,
        best_share=best_share(config, step) if is_apart else None,
        own_share=_own_share(config) if is_apart else None,
        next=None if trace else next_change(config, architecture, step, has_room),
        unstated=unstated_baselines(config, architecture, gain) if is_varied else (),
    )


def _gain(config: Config, architecture: Architecture, step: StepForecast) -> Decomposition | None:
    """Over the baseline; None where sides share GPUs, with pools, or if no baseline fits."""
    if config.placement.colocated or config.generator.pools:
        return None
    baseline = baseline_of(config, architecture)
    if baseline is None:
        return None
    return decompose(config, architecture, baseline=baseline, step=step)


def _own_share(config: Config) -> float:
    """The trainer's, of the ranks of both sides."""
    generators = sum(
        len(pool.replicas) * pool.generator.num_ranks for pool in pools_of(config.generator)
    )
    return config.trainer.num_ranks / (config.trainer.num_ranks + generators)


def figures(config: Config, forecast: Forecast) -> dict[str, Any]:
    """The forecast as plain JSON: bytes, seconds, shares."""
    steps = {"planned": forecast.step, **forecast.variants}
    is_sync = ASYNC in forecast.variants
    found: dict[str, Any] = {
        "num_hosts": forecast.num_hosts,
        "num_gpus": forecast.num_gpus,
        **memory_figures(forecast.memory),
        "publish_s": forecast.publish.seconds,
        "step_async_s": steps[ASYNC if is_sync else "planned"].step_s,
        "step_sync_s": steps["planned" if is_sync else SYNC].step_s,
        "publish": asdict(forecast.publish),
        "steps": {name: asdict(step) for name, step in steps.items()},
    }
    if forecast.decomposition is not None:
        found["speedup"] = forecast.decomposition.speedup
        found["speedup_factors"] = forecast.decomposition.factors
    if forecast.split is not None:
        found["split"] = asdict(replace(forecast.split, step=None))
        del found["split"]["step"]
    if forecast.cost is not None:
        found["cost"] = asdict(forecast.cost) | {"per_hour": forecast.cost.per_hour}
        found["tokens_per_price"] = {
            name: forecast.cost.throughput(step.trained_tokens_per_s)
            for name, step in steps.items()
        }
    if forecast.best_share is not None:
        found["best_share"], found["own_share"] = forecast.best_share, forecast.own_share
    if forecast.next is not None:
        found["next_change"] = {"what": forecast.next.words, "step_s": forecast.next.step.step_s}
    if forecast.num_gpus:
        found["gpu_hours_per_step"] = forecast.gpu_hours
        found |= {f"step_{k}": v for k, v in bands("step", forecast.step.step_s, config).items()}
    if forecast.unstated:
        found["unstated_baselines_s"] = {v.words: v.step.step_s for v in forecast.unstated}
    if forecast.measured_step_s is not None:
        found["step_measured_s"] = forecast.measured_step_s
    return found


def memory_figures(memory: MemoryForecast) -> dict[str, Any]:
    """A forecast of memory as plain JSON: `peak_bytes` of `gpu_bytes` is what the fullest rank of
    all needs of its device."""
    rank = fullest(memory.ranks)
    return {
        "fits": memory.fits,
        "peak_bytes": rank.total_bytes,
        "gpu_bytes": rank.device_bytes,
        "memory": [asdict(each) for each in memory.ranks],
        "advice": [advice.text for advice in memory.advice],
    }


def _check_known(config: Config, run_dir: str | None, sweep: bool) -> Config:
    """The recipe. ValueError if there are pools and a flag that knows none, or a GPU without known
    peaks."""
    check_kinds(config)
    wanted = "be a kind of GPU with known peaks for a forecast of times"
    config.cluster.require(timed(config), "gpu", wanted)
    for flag, is_on in {"--trace": bool(run_dir), "--sweep": sweep}.items():
        must = f"be [] with {flag}, which takes all replicas to be alike"
        config.generator.require(not (is_on and config.generator.pools), "pools", must)
    return config


def _calibrate(run_dir: str, config: Config, architecture: Architecture) -> Trace:
    """Costs and workload of the run; what no span shows is chosen so that its own step comes
    out."""
    own = run_config(run_dir, config)
    trace = read_trace(run_dir, own.sampling.rollouts_per_prompt)
    return fit_overhead(trace, replace(own, plan=_workload(own, trace)), architecture)


def _check_workload(config: Config, trace: Trace | None) -> None:
    """ValueError if prompts fill the context, or no step would end as every group is dropped."""
    most, num_tokens = config.generator.max_model_len, config.plan.prompt_tokens
    wanted = f"be below generator.max_model_len ({most})"
    require(num_tokens < most, "plan.prompt_tokens", wanted, num_tokens)
    if trace is None or EQUAL_REWARDS not in config.algorithm.filters:
        return
    if trace.equal_share(config.sampling.rollouts_per_prompt) == 1:
        raise ValueError(
            f"--trace must name a run with rewards that differ within a group (or set "
            f"algorithm.filters=[]), got {len(trace.rewards)} groups without"
        )


def run_config(run_dir: str, config: Config) -> Config:
    """What the run in `run_dir` was started with; its sections are of the kinds that `config` has.

    ValueError if the folder is no run's, or a section is of another kind.
    """
    path = Path(run_dir, "config.yaml")
    if not path.is_file():
        raise ValueError(f"--trace must name a run's folder, got {run_dir!r} without config.yaml")
    written = yaml.safe_load(path.read_text())
    try:
        written.pop("defaults", None)  # the choices, which the kinds of the sections say
        return _renewed(config, written)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"--trace must name a run of this recipe, with the same engine and algorithm, got "
            f"{run_dir!r}: {error}"
        ) from error


def _renewed(section: T, written: Mapping[str, Any]) -> T:
    """A section with these values, and so the sections in it."""
    values = {
        name: _renewed(own, value) if is_dataclass(own := getattr(section, name)) else value
        for name, value in written.items()
    }
    return replace(section, **values)  # type: ignore[type-var]


def _other_staleness(config: Config) -> tuple[str, Config]:
    """The recipe on-policy; or, if it is, as far ahead as recipes usually are."""
    num_steps = config.trainer.steps_per_batch
    is_sync = config.staleness.max_staleness == num_steps - 1
    other = num_steps - 1 + num_steps * is_sync
    staleness = replace(config.staleness, max_staleness=other)
    return ASYNC if is_sync else SYNC, replace(config, staleness=staleness)


def _workload(config: Config, trace: Trace) -> PlanConfig:
    """The log-normal that is nearest to the lengths a run wrote."""
    logarithms = [math.log(max(1, length)) for length in trace.lengths]
    return replace(
        config.plan,
        prompt_tokens=trace.prompt_tokens,
        median_tokens=max(1, round(statistics.median(trace.lengths))),
        spread=statistics.pstdev(logarithms),
    )
