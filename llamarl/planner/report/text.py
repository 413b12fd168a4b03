"""A forecast as text, and as a page with a picture of memory.

Owns: the tables of `llamarl plan`, the words around them, and what others report, beside which a
forecast is shown. Does not own: any number of a forecast. Invariant: lines of at most WIDTH
characters, the same on a terminal and in a file; nothing that others report enters a forecast; the
page is well-formed XML and refers to nothing outside itself.
"""

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape, quoteattr

from rich.console import RenderableType
from rich.table import Table

from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.device.names import is_gpu
from llamarl.planner.forecast import (
    STAGE,
    Forecast,
    MemoryForecast,
    PublishForecast,
    RankMemory,
    StepForecast,
)
from llamarl.planner.hardware import HOUR_S, kinds_of
from llamarl.planner.memory.fit import refusal
from llamarl.planner.report.bands import NO_BAND
from llamarl.planner.report.published import Published, published_parts
from llamarl.planner.report.tables import make_table, render
from llamarl.planner.report.verdict import cost_words, gain_parts, split_parts, verdict_lines

GIB, GB = 2**30, 10**9
WIDTH = 100
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; }
.row { position: relative; height: 24px; margin: 4px 0 4px 130px; background: #8882; }
.row b { position: absolute; left: -130px; font-weight: normal; }
.row i { position: absolute; height: 100%; overflow: hidden; font: 11px/24px system-ui;
  color: #000; }
.row i.limit { border-left: 2px dashed #d55e00; }
"""
TURN_DEGREES = 137.5  # from one colour to the next: no two of the first dozens are alike


def title_of(config: Config, forecast: Forecast) -> str:
    """One line: what is planned, on what, and whether it fits."""
    one_kind = {config.cluster.planned_gpu: forecast.num_gpus} if forecast.num_gpus else {}
    kinds = kinds_of(config) if config.generator.pools else one_kind
    size = " and ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "CPUs"
    hosts = f"{forecast.num_hosts} host{'s' * (forecast.num_hosts > 1)}"
    name = config.recipe_dir.rstrip("/").rpartition("/")[2]
    verdict = "fits" if forecast.memory.fits else "does not fit"
    return f"{name} on {size} ({hosts}): {verdict}"


def render_report(config: Config, forecast: Forecast, published: Published | None) -> str:
    """The whole report; `published` are the paper's figures for this model, if any."""
    return render([title_of(config, forecast), *_parts(config, forecast, published)])


def render_memory(config: Config, memory: MemoryForecast) -> str:
    """The report of a recipe on cards of which only the memory is known."""
    verdict = "fits" if memory.fits else "does not fit"
    title = f"on cards of {config.cluster.planned_gpu}: {verdict}"
    last = "no forecast of times: peaks are not known"
    return render([title, "", *_memory_parts(memory, config), last])


def render_page(title: str, report: str, words: Iterable[str], memory: MemoryForecast) -> str:
    """The report as one HTML page, with `words` on what its times rest on and a bar per executor,
    cut by kind of memory."""
    body = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(report)}</pre>"]
    body += [f"<p>{escape(sentence)}</p>" for sentence in words]
    body += ["<h2>Memory of the fullest rank</h2>", *_memory_bars(memory)]
    head = f'<meta charset="utf-8"/><title>{escape(title)}</title><style>{STYLE}</style>'
    lines = ["<!DOCTYPE html>", f'<html lang="en"><head>{head}</head><body>', *body]
    return "\n".join([*lines, "</body></html>", ""])


def _memory_bars(memory: MemoryForecast) -> Iterator[str]:
    """A dashed line stands where the device ends."""
    kinds = list(dict.fromkeys(kind for rank in memory.ranks for kind in rank.bytes_by_kind))
    most = max(max(rank.device_bytes, rank.total_bytes) for rank in memory.ranks)
    for rank in memory.ranks:
        yield f'<div class="row"><b>{escape(rank.executor)}</b>'
        left = 0
        for kind, num_bytes in rank.bytes_by_kind.items():
            tip = quoteattr(f"{rank.executor}: {kind} {num_bytes / GIB:.1f} GiB")
            place = f"left: {100 * left / most:.3f}%; width: {100 * num_bytes / most:.3f}%"
            hue = kinds.index(kind) * TURN_DEGREES % 360
            colour = f"background: hsl({hue} 60% 70%)"
            yield f'<i style="{place}; {colour}" title={tip}>{escape(kind)}</i>'
            left += num_bytes
        yield f'<i class="limit" style="left: {100 * rank.device_bytes / most:.3f}%"></i></div>'
    yield f"<p>{most / GIB:.1f} GiB from edge to edge.</p>"


def assumptions(config: Config, forecast: Forecast) -> list[str]:
    """What the forecast's times rest on that the report does not say, in sentences."""
    plan, sampling = config.plan, config.sampling
    words = [
        f"Prompts have {plan.prompt_tokens} tokens. Half of the rollouts stay below "
        f"{plan.median_tokens} tokens; lengths are log-normal (deviation {plan.spread:g} of the "
        f"logarithm), cut at {sampling.max_tokens}.",
        f"A step trains {config.trainer.groups_per_step} groups of {sampling.rollouts_per_prompt} "
        f"rollouts; {plan.num_steps} steps are simulated with the run's own controller.",
    ]
    if config.trainer.steps_per_batch > 1:
        words.append(
            f"A batch is {config.trainer.num_mini_batches} mini-batches of so many groups, trained "
            f"in {config.trainer.num_passes} passes: {config.trainer.steps_per_batch} steps, which "
            "are counted one by one."
        )
    if config.environment.is_used:
        words.append(
            f"An episode has {plan.num_turns} turns and observations of {plan.observation_tokens} "
            f"tokens. Half of the turns wait less than {plan.tool_s:g} s for their environment; "
            f"waits are log-normal (deviation {plan.tool_spread:g} of the logarithm)."
        )
    if forecast.measured_step_s is not None:
        words.append("Executors take as long as in the run that was given.")
    else:
        words.append(
            "Executors take as long as the hardware's published peaks say, times the share of each "
            "that kernels were measured to reach."
        )
    return words


def _parts(
    config: Config, forecast: Forecast, published: Published | None
) -> Iterator[RenderableType]:
    yield ""
    yield from _memory_parts(forecast.memory, config)
    kinds = {kind for rank in forecast.memory.ranks for kind in rank.bytes_by_kind}
    if own := config.experience.stages:
        known = [name for name in own if STAGE + name in kinds]
        but = f", but for the memory of {', '.join(known)}" if known else ""
        yield f"Stages of the recipe's own ({', '.join(own)}) are left out{but}."
    yield publish_words(forecast.publish)
    yield NO_BAND
    yield ""
    yield _step_table(config, forecast)
    waits = forecast.step.wait_shares.items()
    shown = (f"{name} {share:.0%}" for name, share in waits if share >= 0.005)
    yield f"waits as planned: {', '.join(shown)}"
    if forecast.cost is not None:
        yield cost_words(forecast.cost, forecast.step)
    if forecast.step.pools:
        yield ""
        yield _pool_table(config, forecast)
    if forecast.step.divisor > 1:
        yield (
            f"simulated: 1/{forecast.step.divisor} of the cluster with 1/{forecast.step.divisor} "
            f"of the rollouts, which takes as long (llamarl/planner/simulation/fraction.py)"
        )
    if forecast.step.publish_s > 1.1 * forecast.publish.seconds:
        yield (
            f"the last replica has a version after {forecast.step.publish_s:.1f} s: commits take "
            f"turns, or wait for the step at work"
        )
    if forecast.measured_step_s is not None:
        yield f"the run that the times come from took {forecast.measured_step_s:.2f} s a step"
    yield from verdict_lines(config, forecast)
    if forecast.split is not None:
        yield from split_parts(forecast.split)
    if forecast.decomposition is not None:
        yield from gain_parts(forecast.decomposition)
    if published is not None:
        yield from published_parts(forecast, published)


def _memory_parts(memory: MemoryForecast, config: Config) -> Iterator[RenderableType]:
    yield _memory_table(memory)
    yield from (refusal(config, rank) for rank in memory.ranks if not rank.fits)
    for advice in memory.advice:
        yield f"to change: {advice.text}"


def _memory_table(memory: MemoryForecast) -> Table:
    """Kinds down, executors across; whether it fits stands below."""
    ranks = memory.ranks
    names = [f"{rank.executor} x{rank.num_ranks}" for rank in ranks]
    table = make_table("memory of the fullest rank, GiB", *names)
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank.bytes_by_kind):
        table.add_row(kind, *(_gib(rank.bytes_by_kind.get(kind, 0)) for rank in ranks))
    table.add_row("total", *(_gib(rank.total_bytes) for rank in ranks))
    table.add_row("of", *(_gib(rank.device_bytes) for rank in ranks))
    table.add_row("", *map(_margin, ranks))
    if any(rank.host_bytes_by_kind for rank in ranks):
        host = (sum(rank.host_bytes_by_kind.values()) for rank in ranks)
        table.add_row("in host memory", *map(_gib, host))
    return table


def publish_words(publish: PublishForecast) -> str:
    """What one version moves, and how long that takes."""
    return (
        f"publish: {publish.seconds:.2f} s ({publish.lower_bound_s:.2f} s if links ran at full "
        f"speed); {publish.total_bytes / GB:,.1f} GB in {publish.num_copies:,} copies;\n"
        f"the busiest network card sends {publish.max_card_bytes_out / GB:.1f} GB and receives "
        f"{publish.max_card_bytes_in / GB:.1f} GB"
    )


def _step_table(config: Config, forecast: Forecast) -> Table:
    title = "step, simulated with the run's own controller; busy shares"
    table = make_table(title, "seconds", "tokens/s", "trainer", "generators", "staleness")
    place = "colocated" if config.placement.colocated else "disaggregated"
    ahead = config.staleness.max_staleness
    table.add_row(f"as planned: staleness {ahead}, {place}", *_step_cells(forecast.step))
    for name, step in forecast.variants.items():
        table.add_row(name if "," in name else f"{name}, {place}", *_step_cells(step))
    return table


def _step_cells(step: StepForecast) -> Iterator[str]:
    yield f"{step.step_s:.1f}" if step.step_s >= 10 else f"{step.step_s:.2f}"
    yield f"{step.trained_tokens_per_s:,.0f}"
    yield f"{step.busy_shares.get('trainer', 0):.0%}"
    yield f"{step.busy_shares.get('generator', 0):.0%}"
    yield f"{step.mean_staleness:.2f}, max {step.max_staleness}"


def _pool_table(config: Config, forecast: Forecast) -> Table:
    """What each pool does; "per cost" counts its own GPUs alone."""
    columns = ("replicas", "of", "busy", "tokens/s", "publish, s", "per cost, million")
    table = make_table("pools: what they write", *columns)
    for pool in pools_of(config.generator):
        step, num_ranks = forecast.step.pools[pool.key], pool.generator.num_ranks
        kind, per_cost = "CPU", "-"
        if is_gpu(pool.generator.device):
            kind = pool.gpu or config.cluster.planned_gpu
            if forecast.cost is not None:
                price = len(pool.replicas) * num_ranks * forecast.cost.prices[kind]
                per_cost = f"{step.tokens_per_s * HOUR_S / price / 1e6:,.3f}"
        table.add_row(
            pool.key,
            str(len(pool.replicas)),
            f"{num_ranks} x {kind}",
            f"{step.busy_share:.0%}",
            f"{step.tokens_per_s:,.0f}",
            f"{forecast.publish.pool_s[pool.key]:.2f}",
            per_cost,
        )
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes else "-"


def _margin(rank: RankMemory) -> str:
    share = 1 - rank.total_bytes / rank.device_bytes
    return f"{share:.0%} free" if rank.fits else f"{-share:.0%} too much"
