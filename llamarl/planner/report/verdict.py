"""What a forecast comes to: bands, bottleneck, next change, split, gain, cost.

Owns: these words and tables. Does not own: any number of a forecast. Invariant: one sentence for
each finding.
"""

from collections.abc import Iterator

from rich.console import RenderableType

from llamarl.core.config import Config
from llamarl.planner.forecast import BestSplit, Decomposition, Forecast, StepForecast
from llamarl.planner.hardware import HOUR_S, Cost
from llamarl.planner.report.bands import band_words
from llamarl.planner.report.tables import make_table

FACTORS = {
    "overlap": "overlap",
    "batch_and_degree": "batch sizes and parallel degree",
    "precision": "precision",
}
ARGUMENT = (
    "The argument: alternating on the same GPUs, trainer and generators share one memory budget "
    "and one parallel degree; apart, each has its own. With GPU time a per step for the trainer "
    "and c for the generators, the trainer's best share of the GPUs is a / (a + c). LlamaRL states "
    "the result; definitions and proof are our reconstruction "
    "(llamarl/planner/simulation/variants.py)."
)


def verdict_lines(config: Config, forecast: Forecast) -> Iterator[str]:
    """Of a recipe whose times come from hardware, on GPUs; the bottleneck of any."""
    step = forecast.step
    if forecast.num_gpus and forecast.measured_step_s is None:
        yield band_words("step", step.step_s, "a step as planned", config)
    shares = [(step.busy_shares.get(name, 0.0), name) for name in ("trainer", "generator")]
    (most, name), (least, other) = sorted(shares, reverse=True)
    sides = {"trainer": "the trainer", "generator": "the generators"}
    verb = {"trainer": "works", "generator": "work"}
    yield (
        f"bottleneck: {sides[name]}, which {verb[name]} {most:.0%} of the step "
        f"({other} {least:.0%})"
    )
    if forecast.best_share is not None and forecast.own_share is not None:
        distance = abs(forecast.own_share - forecast.best_share)
        yield (
            f"theta*: by the GPU time of both sides {forecast.best_share:.0%} of the GPUs are best "
            f"for the trainer; it has {forecast.own_share:.0%}, {100 * distance:.0f} points away"
        )
    if forecast.next is not None:
        gain = step.step_s / forecast.next.step.step_s
        yield (
            f"next best change: {forecast.next.words}: {forecast.next.step.step_s:.1f} s a step, "
            f"{gain:.2f}x"
        )
    elif forecast.measured_step_s is None and forecast.decomposition is not None:
        yield "next best change: none of those tried shortens the step by 2 %"
    if forecast.num_gpus:
        num_steps = config.num_steps if config.num_epochs else config.last_step or 0
        words = f"GPU hours: {_shown(forecast.gpu_hours)} a step"
        price = forecast.cost.per_hour * step.step_s / HOUR_S if forecast.cost is not None else 0
        if num_steps:
            words += f", {_shown(num_steps * forecast.gpu_hours)} for {num_steps:,} steps"
        if forecast.cost is not None:
            whole = f" and {_shown(num_steps * price)}" if num_steps else ""
            words += f"; cost: {_shown(price)}{whole} ({forecast.cost.unit})"
        yield words


def _shown(number: float) -> str:
    """With three digits, or whole."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def cost_words(cost: Cost, step: StepForecast) -> str:
    """What an hour costs, and what is trained for it."""
    each = (f"{number} x {kind} at {cost.prices[kind]:g}" for kind, number in cost.num_gpus.items())
    millions = cost.throughput(step.trained_tokens_per_s) / 1e6
    return (
        f"cost of an hour ({cost.unit}): {' + '.join(each)} = {cost.per_hour:,.2f};\n"
        f"throughput per cost: {millions:,.3f} million trained tokens for a price of 1"
    )


def split_parts(split: BestSplit) -> Iterator[RenderableType]:
    """The splits that were tried."""
    yield ""
    table = make_table("splits of the GPUs, best first", "trainer ranks", "replicas", "s per step")
    for i, candidate in enumerate(split.candidates):
        cells = (candidate.num_trainer_ranks, candidate.num_replicas)
        table.add_row("best" if i == 0 else "", *map(str, cells), f"{candidate.step_s:.1f}")
    yield table
    if not split.candidates:
        yield "no split fits"
    yield f"a / (a + c) = {split.best_share:.0%} for the trainer. {ARGUMENT}"


def gain_parts(decomposition: Decomposition) -> Iterator[str]:
    """What the gain over the baseline consists of."""
    yield ""
    factors = " x ".join(f"{FACTORS[k]} {v:.2f}" for k, v in decomposition.factors.items())
    yield f"gain over sync, colocated: {decomposition.speedup:.2f}x = {factors}"
    yield f"  {decomposition.baseline.step.step_s:.1f} s: {decomposition.baseline.words}"
    for variant in decomposition.stages.values():
        yield f"  {variant.step.step_s:.1f} s: {variant.words}"
