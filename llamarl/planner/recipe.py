"""The whole forecast of one recipe. It starts no process, and reads only the architecture and, if
asked to, a finished run's folder."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from llamarl.controller.fit import check_kinds
from llamarl.controller.memory import fits, forecast_memory, forecast_trainer_rank
from llamarl.core.config import Config, rank_assignment
from llamarl.core.config.generator import pools_of
from llamarl.core.device.names import size_bytes
from llamarl.core.fields import require_choice
from llamarl.model.architecture import NO_MODELS, Architecture, FrozenModels
from llamarl.planner import report
from llamarl.planner.changes import best_splits, next_change
from llamarl.planner.forecast import PLANNED, Forecast, StepForecast
from llamarl.planner.law import hardware_costs
from llamarl.planner.one_side import forecast_generator_alone, forecast_trainer_alone
from llamarl.planner.publish import forecast_publish
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.simulated_run import fewest_steps, simulate
from llamarl.planner.simulation.workload import with_lengths
from llamarl.planner.trace import calibrate, check_rewards, with_workload

MORE_STEPS = 2  # of the other staleness, than are needed to compare changes
SIDES = ("trainer", "generator", "publish")


def forecast_recipe(
    config: Config,
    architecture: Architecture,
    *,
    frozen: FrozenModels = NO_MODELS,
    run_dir: str | None = None,
    sweep: bool = False,
) -> Forecast:
    """Forecast memory, publish and step time of `config`, beside the same with another
    max_staleness.

    Times come from hardware, or with `run_dir` from that finished run, whose layout is then the
    only one whose times are known. `frozen` models count in memory alone. `sweep` tries other
    splits of the processes between trainer and generators. Neither goes with pools. ValueError if
    the ranks do not fit onto the hosts, or the run lacks what is needed.
    """
    _check_times(config)
    for flag, is_on in {"--trace": bool(run_dir), "--sweep": sweep}.items():
        must = f"be [] with {flag}, which takes all replicas to be alike"
        config.generator.require(not (is_on and config.generator.pools), "pools", must)
    config = with_lengths(config)
    taken = {device for places in rank_assignment.assign(config).values() for device in places}
    trace = calibrate(run_dir, config, architecture) if run_dir else None
    if trace is not None:
        config = with_workload(config, trace)
        check_rewards(config, trace)
    most = config.generator.max_model_len
    wanted = f"be below generator.max_model_len ({most})"
    config.plan.require(config.plan.prompt_tokens < most, "prompt_tokens", wanted)
    publish = forecast_publish(config, architecture)

    def costs_of(config: Config) -> Costs:
        return trace.costs if trace else hardware_costs(config, architecture)

    def step_of(config: Config, num_steps: int | None = None) -> StepForecast:
        workload = trace.workload(config) if trace else None
        return simulate(
            config, architecture, costs_of(config), workload=workload, num_steps=num_steps
        )

    has_room = partial(fits, architecture=architecture, frozen=frozen)
    step = step_of(config)
    name, other = _other_staleness(config)
    return Forecast(
        num_hosts=len({device.host for device in taken}),
        num_gpus=len({device for device in taken if device.gpu is not None}),
        memory=forecast_memory(config, architecture, frozen),
        publish=publish,
        steps={PLANNED: step, name: step_of(other, fewest_steps(other) + MORE_STEPS)},
        splits=best_splits(config, step, step_of, has_room) if sweep else None,
        measured_step_s=trace.step_s if trace else None,
        next=None if trace else next_change(config, architecture, step, has_room),
    )


def forecast_one_side(
    only: str, config: Config, architecture: Architecture
) -> tuple[str, dict[str, Any]]:
    """Forecast the trainer, one replica, or a publish: return the text, and the figures as JSON.
    ValueError for another side, or a GPU of which only the memory is known."""
    require_choice("--only", only, SIDES)
    _check_times(config)
    if only == "trainer":
        trainer = forecast_trainer_alone(config, architecture)
        memory = forecast_trainer_rank(config, architecture)
        figures = asdict(trainer) | report.bands(only, trainer.step_s, config)
        figures["tokens_per_s"] = trainer.tokens_per_s
        figures["tokens_per_s_per_gpu"] = trainer.tokens_per_s / trainer.num_ranks
        figures["memory"] = asdict(memory)
        return report.render(report.trainer_parts(config, trainer, memory)), figures
    if only == "generator":
        generator = forecast_generator_alone(config, architecture)
        figures = asdict(generator)
        figures |= report.bands(only, sum(generator.seconds.values()), config)
        return report.render(report.generator_parts(config, generator)), figures
    publish = forecast_publish(config, architecture)
    return report.render(report.publish_parts(publish)), report.publish_figures(publish)


def timed(config: Config) -> bool:
    """Return whether there are peaks to forecast times from: no GPU of the recipe is only a
    size."""
    kinds = {config.cluster.planned_gpu, *(pool.gpu for pool in pools_of(config.generator))}
    return all(size_bytes(kind) is None for kind in kinds)


def _check_times(config: Config) -> None:
    check_kinds(config)
    wanted = "be a kind of GPU with known peaks for a forecast of times"
    config.cluster.require(timed(config), "gpu", wanted)


def _other_staleness(config: Config) -> tuple[str, Config]:
    """Return the recipe with on-policy staleness; or, if it has that, with the usual run-ahead."""
    num_steps = config.trainer.steps_per_batch
    is_sync = config.staleness.max_staleness == num_steps - 1
    other = num_steps - 1 + num_steps * is_sync
    staleness = replace(config.staleness, max_staleness=other)
    return "async" if is_sync else "sync", replace(config, staleness=staleness)
