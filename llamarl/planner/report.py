"""A forecast as text and as plain JSON.

A time on GPUs comes with its band, or with a line that says why it has none."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llamarl.controller.memory import MemoryForecast, RankMemory, fullest, refusal
from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import assign
from llamarl.core.device.names import is_gpu
from llamarl.planner.efficiency import CONFIRMED, SPREADS
from llamarl.planner.forecast import (
    PLANNED,
    Forecast,
    GeneratorForecast,
    PublishForecast,
    Split,
    StepForecast,
    TrainerForecast,
)
from llamarl.planner.publish import STAGES
from llamarl.trainer.memory import STAGE

GIB, GB = 2**30, 10**9
WIDTH = 100
NO_BAND = "no band for a publish: no measurement on GPUs has been compared with its forecast"
BUSIEST = {"trainer": "the trainer, which works", "generator": "the generators, which work"}

Part = str | list[str]
"""A line, which is wrapped, or the lines of a table, which are not."""
Band = tuple[float, float]
"""The shortest and the longest time, in seconds."""


def render(parts: Iterable[Part]) -> str:
    """Return these parts as text, one below the other."""
    lines: list[str] = []
    for part in parts:
        lines += part if isinstance(part, list) else textwrap.wrap(part, WIDTH) or [""]
    return "\n".join(lines) + "\n"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: names on the left, all else on the right of its column."""
    cells = [["", *columns], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [title]
    for name, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *padded]).rstrip())
    return lines


def render_report(config: Config, forecast: Forecast) -> str:
    """Return the whole report of a recipe."""
    one_kind = {config.cluster.planned_gpu: forecast.num_gpus} if forecast.num_gpus else {}
    kinds = kinds_of(config) if config.generator.pools else one_kind
    size = " and ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "CPUs"
    hosts = f"{forecast.num_hosts} host{'s' * (forecast.num_hosts > 1)}"
    name = config.recipe_dir.rstrip("/").rpartition("/")[2]
    title = f"{name} on {size} ({hosts}): {_verdict(forecast.memory)}"
    return render([title, "", *_memory_parts(forecast.memory, config), *_parts(config, forecast)])


def render_memory(config: Config, memory: MemoryForecast) -> str:
    """Return the report of a recipe on cards of which only the memory is known."""
    title = f"on cards of {config.cluster.planned_gpu}: {_verdict(memory)}"
    last = "no forecast of times: peaks are not known"
    return render([title, "", *_memory_parts(memory, config), last])


def kinds_of(config: Config) -> dict[str, int]:
    """Return how many GPUs have a rank, by kind, the trainer's first."""
    devices = {device for places in assign(config).values() for device in places}
    places = {(each.host, each.gpu): each.gpu_kind for each in devices if each.gpu is not None}
    usual = config.cluster.planned_gpu
    counts = Counter(kind or usual for kind in places.values())
    return dict(sorted(counts.items(), key=lambda item: item[0] != usual))


def _verdict(memory: MemoryForecast) -> str:
    return "fits" if memory.fits else "does not fit"


def _parts(config: Config, forecast: Forecast) -> Iterator[Part]:
    step, publish = forecast.step, forecast.publish
    kinds = {kind for rank in forecast.memory.ranks for kind in rank.bytes_by_kind}
    if own := config.experience.stages:
        known = [name for name in own if STAGE + name in kinds]
        but = f", but for the memory of {', '.join(known)}" if known else ""
        yield f"Stages of the recipe's own ({', '.join(own)}) are left out{but}."
    yield publish_words(publish)
    yield NO_BAND
    yield ""
    yield _step_table(config, forecast)
    waits = [f"{name} {share:.0%}" for name, share in step.wait_shares.items() if share >= 0.005]
    yield f"waits as planned: {', '.join(waits) or 'none'}"
    if step.pools:
        yield ""
        yield _pool_table(config, forecast)
    if step.publish_s > 1.1 * publish.seconds:
        yield (
            f"the last replica has a version after {step.publish_s:.1f} s: commits take turns, or "
            "wait for the step at work"
        )
    if forecast.measured_step_s is not None:
        yield f"the run that the times come from took {forecast.measured_step_s:.2f} s a step"
    elif forecast.num_gpus:
        yield band_words("step", step.step_s, "a step as planned", config)
    yield from _conclusions(config, forecast)
    if forecast.splits is not None:
        yield ""
        yield from _split_parts(forecast.splits)


def _memory_parts(memory: MemoryForecast, config: Config) -> Iterator[Part]:
    yield memory_table(memory.ranks)
    yield from (refusal(config, rank) for rank in memory.ranks if not rank.fits)
    yield from (f"to change: {advice.text}" for advice in memory.advice)


def memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """Return a table with kinds down and executors across; whether it fits stands below."""
    rows = [
        [kind, *(_gib(rank.bytes_by_kind.get(kind, 0)) for rank in ranks)]
        for kind in dict.fromkeys(kind for rank in ranks for kind in rank.bytes_by_kind)
    ]
    rows.append(["total", *(_gib(rank.total_bytes) for rank in ranks)])
    rows.append(["of", *(_gib(rank.device_bytes) for rank in ranks)])
    rows.append(["", *map(_margin, ranks)])
    if any(rank.host_bytes_by_kind for rank in ranks):
        host = [sum(rank.host_bytes_by_kind.values()) for rank in ranks]
        rows.append(["in host memory", *map(_gib, host)])
    names = [f"{rank.executor} x{rank.num_ranks}" for rank in ranks]
    return table("memory of the fullest rank, GiB", names, rows)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes else "-"


def _margin(rank: RankMemory) -> str:
    share = 1 - rank.total_bytes / rank.device_bytes
    return f"{share:.0%} free" if rank.fits else f"{-share:.0%} too much"


def publish_words(publish: PublishForecast) -> str:
    """Return the line about the bytes that one version moves, and how long that takes."""
    return (
        f"publish: {publish.seconds:.2f} s ({publish.lower_bound_s:.2f} s if links ran at full "
        f"speed); {publish.total_bytes / GB:,.1f} GB to all replicas, of which the busiest network "
        f"card sends {publish.max_card_bytes_out / GB:.1f} GB and receives "
        f"{publish.max_card_bytes_in / GB:.1f} GB"
    )


def _step_table(config: Config, forecast: Forecast) -> list[str]:
    place = "colocated" if config.placement.colocated else "disaggregated"
    planned = f"as planned: staleness {config.staleness.max_staleness}"
    rows = [
        [f"{planned if name == PLANNED else name}, {place}", *_step_cells(step)]
        for name, step in forecast.steps.items()
    ]
    title = "step, simulated with the run's own controller; busy shares"
    return table(title, ("seconds", "tokens/s", "trainer", "generators", "staleness"), rows)


def _step_cells(step: StepForecast) -> Iterator[str]:
    yield f"{step.step_s:.1f}" if step.step_s >= 10 else f"{step.step_s:.2f}"
    yield f"{step.trained_tokens_per_s:,.0f}"
    yield f"{step.busy_shares.get('trainer', 0):.0%}"
    yield f"{step.busy_shares.get('generator', 0):.0%}"
    yield f"{step.mean_staleness:.2f}, max {step.max_staleness}"


def _pool_table(config: Config, forecast: Forecast) -> list[str]:
    """Return the table of the work of each pool."""
    rows = []
    for pool in pools_of(config.generator):
        step, generator = forecast.step.pools[pool.key], pool.generator
        kind = (pool.gpu or config.cluster.planned_gpu) if is_gpu(generator.device) else "CPU"
        cells = [str(len(pool.replicas)), f"{generator.num_ranks} x {kind}"]
        cells += [f"{step.busy_share:.0%}", f"{step.tokens_per_s:,.0f}"]
        rows.append([pool.key, *cells, f"{forecast.publish.pool_s[pool.key]:.2f}"])
    columns = ("replicas", "of", "busy", "tokens/s", "publish, s")
    return table("pools: what they write", columns, rows)


def _conclusions(config: Config, forecast: Forecast) -> Iterator[str]:
    """Yield the lines about bottleneck, next change and GPU hours."""
    step = forecast.step
    shares = [(step.busy_shares.get(name, 0.0), name) for name in BUSIEST]
    (most, name), (least, other) = sorted(shares, reverse=True)
    yield f"bottleneck: {BUSIEST[name]} {most:.0%} of the step ({other} {least:.0%})"
    if forecast.next is not None:
        next_s = forecast.next.step.step_s
        yield (
            f"next best change: {forecast.next.words}: {_digits(next_s)} s a step, "
            f"{step.step_s / next_s:.2f}x"
        )
    elif forecast.measured_step_s is None and not config.generator.pools:
        yield "next best change: none of those tried shortens the step by 2 %"
    if forecast.num_gpus:
        num_steps = config.num_steps if config.num_epochs else config.last_step or 0
        words = f"GPU hours: {_digits(forecast.gpu_hours)} a step"
        if num_steps:
            words += f", {_digits(num_steps * forecast.gpu_hours)} for {num_steps:,} steps"
        yield words


def _digits(number: float) -> str:
    """Return a number with three digits, or whole."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _split_parts(splits: Sequence[Split]) -> Iterator[Part]:
    rows = [
        [
            "best" if i == 0 else "",
            str(each.num_trainer_ranks),
            str(each.num_replicas),
            f"{each.step_s:.1f}",
        ]
        for i, each in enumerate(splits)
    ]
    columns = ("trainer ranks", "replicas", "s per step")
    yield table("splits of the GPUs, best first", columns, rows)
    if not splits:
        yield "no split fits"


def figures(config: Config, forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as plain JSON: bytes, seconds, shares."""
    found: dict[str, Any] = {
        "num_hosts": forecast.num_hosts,
        "num_gpus": forecast.num_gpus,
        **memory_figures(forecast.memory),
        "publish_s": forecast.publish.seconds,
        "publish": publish_figures(forecast.publish),
        "step_s": forecast.step.step_s,
        "steps": {name: asdict(step) for name, step in forecast.steps.items()},
    }
    if forecast.splits is not None:
        found["splits"] = [asdict(split) for split in forecast.splits]
    if forecast.next is not None:
        found["next_change"] = {"what": forecast.next.words, "step_s": forecast.next.step.step_s}
    if forecast.num_gpus:
        found["gpu_hours_per_step"] = forecast.gpu_hours
    if forecast.measured_step_s is not None:
        found["step_measured_s"] = forecast.measured_step_s
    elif forecast.num_gpus:
        found |= {f"step_{k}": v for k, v in bands("step", forecast.step.step_s, config).items()}
    return found


def memory_figures(memory: MemoryForecast) -> dict[str, Any]:
    """Return a forecast of memory as plain JSON: the fullest rank of all needs `peak_bytes` of the
    `gpu_bytes` of its device."""
    rank = fullest(memory.ranks)
    return {
        "fits": memory.fits,
        "peak_bytes": rank.total_bytes,
        "gpu_bytes": rank.device_bytes,
        "memory": [asdict(each) for each in memory.ranks],
        "advice": [advice.text for advice in memory.advice],
    }


def publish_figures(publish: PublishForecast) -> dict[str, Any]:
    """Return a forecast of a publish as plain JSON."""
    return asdict(publish) | {"pool_s": publish.pool_s}


# One side alone


def trainer_parts(config: Config, found: TrainerForecast, memory: RankMemory) -> Iterator[Part]:
    """Yield the parts that `--only trainer` prints."""
    trainer = config.trainer
    layout = f"{trainer.num_shard_ranks} shards x {trainer.tensor_parallel} tensor parallel"
    if trainer.replicate > 1:
        layout += f" x {trainer.replicate} copies"
    mean = found.num_tokens / found.num_rollouts
    yield (
        f"trainer on {found.num_ranks} x {_kind(config, trainer.device)}: {layout}, checkpointing "
        f"{trainer.activation_checkpointing}"
    )
    yield (
        f"a step of {found.num_rollouts:,} rollouts of {mean:,.0f} tokens, in "
        f"{found.num_micro_batches} micro-batches of at most "
        f"{trainer.tokens_per_micro_batch:,}: {found.step_s:.3g} s"
    )
    yield (
        f"{found.tokens_per_s / found.num_ranks:,.0f} tokens/s per GPU, {found.tokens_per_s:,.0f} "
        f"in all; {found.utilisation:.1%} of the published peak"
    )
    yield f"of the step: {_shares(found.seconds)}"
    yield band_words("trainer", found.step_s, "the step", config)
    yield memory_table([memory])


def generator_parts(config: Config, found: GeneratorForecast) -> Iterator[Part]:
    """Yield the parts that `--only generator` prints."""
    generator = config.generator
    prompt = found.num_prompt_tokens / found.num_rollouts
    answer = found.num_tokens / found.num_rollouts
    room = f"; its KV cache holds {found.kv_tokens:,} tokens" if found.kv_tokens else ""
    seconds = sum(found.seconds.values())
    yield (
        f"a replica on {found.num_ranks} x {_kind(config, generator.device)}: at most "
        f"{generator.max_num_seqs:,} rollouts together{room}"
    )
    yield (
        f"{found.num_rollouts:,} rollouts of {prompt:,.0f} + {answer:,.0f} tokens: {seconds:.3g} "
        f"s, {found.tokens_per_s:,.0f} tokens/s"
    )
    yield (
        f"{found.mean_running:,.0f} together in the mean, {1e3 * found.decode_step_s:.3g} ms per "
        f"decode step; {_shares(found.seconds)}"
    )
    yield band_words("generator", seconds, "this", config)


def publish_parts(found: PublishForecast) -> Iterator[Part]:
    """Yield the parts that `--only publish` prints: where its time goes, by the stages that take
    any."""
    yield publish_words(found)
    rows = [
        [f"{name}: {STAGES[name]}", f"{stage_s:.3f}", f"{stage_s / found.seconds:.0%}"]
        for name, stage_s in found.stages_s.items()
        if stage_s > 0
    ]
    yield table("where the time goes", ("seconds", "share"), rows)
    yield NO_BAND


def _kind(config: Config, device: str) -> str:
    return config.cluster.planned_gpu if is_gpu(device) else "CPU"


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    shown = ((name, each / total) for name, each in seconds.items())
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= 0.005)


# Bands


def unconfirmed(kind: str, config: Config) -> str:
    """Return the sides whose forecast no measurement confirms, such as "a generator on H20-96GB",
    of a "trainer", a "generator" or a "step", which has both; "" if there are measurements for all.
    """
    own = config.cluster.planned_gpu
    cards = {
        "trainer": [own if is_gpu(config.trainer.device) else "CPUs"],
        "generator": [
            (pool.gpu or own) if is_gpu(pool.generator.device) else "CPUs"
            for pool in pools_of(config.generator)
        ],
    }
    found = {
        f"a {side} on {card}"
        for side in (cards if kind == "step" else [kind])
        for card in cards[side]
        if card not in CONFIRMED[side]
    }
    return " and ".join(sorted(found))


def bands(kind: str, seconds: float, config: Config) -> dict[str, Band]:
    """Return the ranges that public measurements let expect for a forecast of `seconds`: "band_s"
    holds nine of ten of them, and for one side "half_s" holds the middle half. Empty where no
    measurement confirms the kind of card. A step is as uncertain as any of its sides, or as whole
    steps are."""
    if unconfirmed(kind, config):
        return {}
    wide = SPREADS.values() if kind == "step" else [SPREADS[kind]]
    low, high = min(each.most[0] for each in wide), max(each.most[1] for each in wide)
    found = {"band_s": (seconds * low, seconds * high)}
    if kind != "step":
        low, high = SPREADS[kind].half
        found["half_s"] = seconds * low, seconds * high
    return found


def band_words(kind: str, seconds: float, what: str, config: Config) -> str:
    """Return the line about the band of a forecast, or why it has none."""
    if unknown := unconfirmed(kind, config):
        return f"no band: no public measurement confirms forecasts of {unknown}"
    ends = bands(kind, seconds, config).items()
    found = {key: f"{low:.3g} to {high:.3g} s" for key, (low, high) in ends}
    if kind == "step":
        return (
            f"band: {what} takes {found['band_s']}: nine of ten public measurements of its sides, "
            f"and {SPREADS['step'].num_rows} of whole steps, are as far off their forecasts"
        )
    return (
        f"band: {what} takes {found['half_s']} if it is like the middle half of "
        f"{SPREADS[kind].num_rows} public measurements, {found['band_s']} if like nine of ten"
    )
