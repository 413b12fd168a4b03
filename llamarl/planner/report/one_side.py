"""The forecast of one side of a recipe, as text and as plain JSON.

Owns: what `llamarl plan --only` prints and writes. Does not own: any number
(`simulation/single.py`, `simulation/publish.py`), or the report of a whole recipe (`text.py`).
Invariant: every forecast of time comes with its band, or says that it has none."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from llamarl.core.config import Config
from llamarl.core.device.names import is_gpu
from llamarl.core.fields import require_choice
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import GeneratorForecast, PublishForecast, TrainerForecast
from llamarl.planner.hardware import check_kinds, timed
from llamarl.planner.report.bands import NO_BAND, band_words, bands
from llamarl.planner.report.tables import make_table, render
from llamarl.planner.report.text import publish_words
from llamarl.planner.simulation.publish import forecast_publish
from llamarl.planner.simulation.single import forecast_generator_alone, forecast_trainer_alone
from llamarl.planner.simulation.stages import STAGES

Found = tuple[str, dict[str, Any]]
"""The text, and the figures as JSON."""


def forecast_one_side(only: str, config: Config, architecture: Architecture) -> Found:
    """Of the trainer, of one replica, or of a publish. ValueError for another side, or a GPU of
    which only the memory is known."""
    require_choice("--only", only, SIDES)
    check_kinds(config)
    wanted = "be a kind of GPU with known peaks for a forecast of times"
    config.cluster.require(timed(config), "gpu", wanted)
    return SIDES[only](config, architecture)


def _trainer(config: Config, architecture: Architecture) -> Found:
    found = forecast_trainer_alone(config, architecture)
    return render(_trainer_lines(config, found)), asdict(found) | _speeds(config, found)


def _generator(config: Config, architecture: Architecture) -> Found:
    found = forecast_generator_alone(config, architecture)
    seconds = sum(found.seconds.values())
    figures = asdict(found) | bands("generator", seconds, config)
    return render(_generator_lines(config, found)), figures


def _publish(config: Config, architecture: Architecture) -> Found:
    found = forecast_publish(config, architecture)
    return render(_publish_lines(found)), asdict(found)


SIDES: dict[str, Callable[[Config, Architecture], Found]] = {
    "trainer": _trainer,
    "generator": _generator,
    "publish": _publish,
}


def _speeds(config: Config, found: TrainerForecast) -> dict[str, Any]:
    return bands("trainer", found.step_s, config) | {
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / found.num_ranks,
    }


def _trainer_lines(config: Config, found: TrainerForecast) -> list[str]:
    trainer = config.trainer
    layout = f"{trainer.num_shard_ranks} shards x {trainer.tensor_parallel} tensor parallel"
    if trainer.replicate > 1:
        layout += f" x {trainer.replicate} copies"
    mean = found.num_tokens / found.num_rollouts
    speed = found.tokens_per_s / found.num_ranks
    return [
        f"trainer on {found.num_ranks} x {_kind(config, trainer.device)}: {layout}, "
        f"checkpointing {trainer.activation_checkpointing}",
        f"a step of {found.num_rollouts:,} rollouts of {mean:,.0f} tokens, in "
        f"{found.num_micro_batches} micro-batches of at most "
        f"{trainer.tokens_per_micro_batch:,}: {found.step_s:.3g} s",
        f"{speed:,.0f} tokens/s per GPU, {found.tokens_per_s:,.0f} in all; "
        f"{found.utilisation:.1%} of the published peak",
        f"of the step: {_shares(found.seconds)}",
        band_words("trainer", found.step_s, "the step", config),
    ]


def _generator_lines(config: Config, found: GeneratorForecast) -> list[str]:
    generator = config.generator
    prompt = found.num_prompt_tokens / found.num_rollouts
    answer = found.num_tokens / found.num_rollouts
    room = f"; its KV cache holds {found.kv_tokens:,} tokens" if found.kv_tokens else ""
    seconds = sum(found.seconds.values())
    return [
        f"a replica on {found.num_ranks} x {_kind(config, generator.device)}: at most "
        f"{generator.max_num_seqs:,} rollouts together{room}",
        f"{found.num_rollouts:,} rollouts of {prompt:,.0f} + {answer:,.0f} tokens: "
        f"{seconds:.3g} s, {found.tokens_per_s:,.0f} tokens/s",
        f"{found.mean_running:,.0f} together in the mean, {1e3 * found.decode_step_s:.3g} ms per "
        f"decode step; {_shares(found.seconds)}",
        band_words("generator", seconds, "this", config),
    ]


def _publish_lines(found: PublishForecast) -> list[RenderableType]:
    return [publish_words(found), _stage_table(found), NO_BAND]


def _stage_table(found: PublishForecast) -> Table:
    """Where the time of a publish goes: the stages that take any."""
    table = make_table("where the time goes", "seconds", "share", "what is done")
    table.columns[-1].justify = "left"
    for name, stage_s in found.stages_s.items():
        if stage_s > 0:
            table.add_row(name, f"{stage_s:.3f}", f"{stage_s / found.seconds:.0%}", STAGES[name])
    return table


def _kind(config: Config, device: str) -> str:
    return config.cluster.planned_gpu if is_gpu(device) else "CPU"


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    shown = ((name, each / total) for name, each in seconds.items())
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= 0.005)
