"""A forecast as drawings: memory by kind, and a timeline of what each executor does.

Owns: one HTML page with inline SVG. Does not own: the numbers. Invariant: the page is well-formed
XML and refers to nothing outside itself; a text stands in a box of its own or is left out, so no
two overlap.

Drawn here because the page is one file of 60 kB that opens anywhere: plotly's holds 4.8 MB of
JavaScript, matplotlib takes 80 MB and a second to import, and its SVG has no tooltips.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from llamarl.planner.forecast import Activity, Forecast, RankMemory, StepForecast

GIB = 2**30
WIDTH, LEFT, RIGHT = 1000, 130, 20  # pixels: the drawing, its labels' column, its margin
ROW, BAR, AXIS = 34, 24, 30
LETTER = 6.7  # pixels a letter of 11 px takes at most, on average over a label
ROUNDING_S = 1e-6
MAX_ALIKE = 4  # executors of one kind in the timeline; the others do what these do

# Okabe and Ito's colours, which the colour-blind can distinguish too, then lighter and darker ones,
# so ordered that neighbours differ; dark or white letters stand on each, whichever can be read.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#56b4e9", "#999999",
    "#8f4a74", "#a36f00", "#00664b", "#f7c9a9", "#1b2a49", "#b7e1a1", "#5e4fa2", "#d9d9d9",
)  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #c8c8c8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --line: #4a4d52; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1040px; margin: 2em auto; padding: 0 1em; }
svg { width: 100%; height: auto; }
svg rect { stroke: var(--paper); stroke-width: 0.5; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
.line { stroke: var(--line); }
.limit { stroke: #d55e00; stroke-width: 2; stroke-dasharray: 5 3; }
.key { display: inline-block; margin-right: 1.2em; white-space: nowrap; }
.key i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; }
"""


def draw_page(title: str, forecast: Forecast, assumptions: Sequence[str] = ()) -> str:
    """The whole page as text: memory of every executor's fullest rank, then the timelines.

    `assumptions` are sentences on what the times rest on. An activity has one colour throughout.
    """
    steps = {"as planned": forecast.step, **forecast.variants}
    colours = _colours([bar.name for step in steps.values() for bar in step.timeline])
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_summary(forecast))}</p>",
        "<h2>Memory of the fullest rank</h2>",
        *draw_memory(forecast.memory.ranks),
    ]
    if assumptions:
        items = [f"<li>{escape(words)}</li>" for words in assumptions]
        body += ["<h2>What the times rest on</h2>", "<ul>", *items, "</ul>"]
    for name, step in steps.items():
        if step.timeline:
            body += [f"<h2>Timeline: {escape(name)}</h2>", f"<p>{_step_words(step)}</p>"]
            body += draw_timeline(step.timeline, colours)
    text = "\n".join(body)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head>\n<body>\n{text}\n</body></html>\n"
    )


def draw_memory(ranks: Sequence[RankMemory]) -> Iterator[str]:
    """One bar per executor, cut by kind; a dashed line where the device ends."""
    colours = _colours([kind for rank in ranks for kind in rank.bytes_by_kind])
    most = max(max(rank.device_bytes, rank.total_bytes) for rank in ranks) / GIB
    scale = (WIDTH - LEFT - RIGHT) / most
    height = len(ranks) * ROW + AXIS
    yield f'<svg viewBox="0 0 {WIDTH} {height}" role="img">'
    yield from _ticks(most, scale, height, "GiB")
    for i, rank in enumerate(ranks):
        top = i * ROW + (ROW - BAR) / 2
        yield _label(rank.executor, top)
        start = 0.0
        for kind, num_bytes in rank.bytes_by_kind.items():
            length = num_bytes / GIB
            tip = f"{rank.executor}: {kind} {length:.1f} GiB"
            yield from _bar(kind, tip, colours[kind], start * scale, length * scale, top)
            start += length
        limit = LEFT + rank.device_bytes / GIB * scale
        yield (
            f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 3:.1f}" '
            f'y2="{top + BAR + 3:.1f}"><title>device memory</title></line>'
        )
    yield "</svg>"
    yield _keys(colours)


def draw_timeline(activities: Sequence[Activity], colours: Mapping[str, str]) -> Iterator[str]:
    """One row per executor, at most MAX_ALIKE of each kind; `colours` by the activities' names.

    What one executor does at the same time as something else stands in a lane below it.
    """
    names = list(dict.fromkeys(activity.executor for activity in activities))
    drawn = _drawn(names)
    shown = [activity for activity in activities if activity.executor in drawn]
    lanes = _lanes(shown)
    tops: dict[str, float] = {}
    bottom = 0.0
    for name in drawn:
        tops[name] = bottom + (ROW - BAR) / 2
        bottom += ROW + (BAR + 2) * max(lanes[i] for i, a in enumerate(shown) if a.executor == name)
    origin = min(activity.start_s for activity in shown)
    duration = max(activity.end_s for activity in shown) - origin
    scale = (WIDTH - LEFT - RIGHT) / max(duration, 1e-9)
    yield f'<svg viewBox="0 0 {WIDTH} {bottom + AXIS:.0f}" role="img">'
    yield from _ticks(duration, scale, int(bottom) + AXIS, "s")
    for name, top in tops.items():
        yield _label(name, top)
    for activity, lane in zip(shown, lanes, strict=True):
        top = tops[activity.executor] + lane * (BAR + 2)
        start, length = activity.start_s - origin, activity.end_s - activity.start_s
        tip = f"{activity.executor}: {activity.name}, {length:.2f} s from {start:.2f} s"
        colour = colours[activity.name]
        yield from _bar(activity.name, tip, colour, start * scale, length * scale, top)
    yield "</svg>"
    here = {activity.name for activity in shown}
    yield _keys({name: colour for name, colour in colours.items() if name in here})
    if len(names) > len(drawn):
        yield f"<p>{len(names) - len(drawn)} more executors, which do alike, are not drawn.</p>"


def _drawn(names: Sequence[str]) -> list[str]:
    """The first few of each kind ("generator-3" is a generator)."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition("-")[0], []).append(name)
    return [name for alike in kinds.values() for name in alike[:MAX_ALIKE]]


def _lanes(activities: Sequence[Activity]) -> list[int]:
    """For each activity the first lane of its executor that is free when it starts."""
    lanes = [0] * len(activities)
    free_s: dict[str, list[float]] = {}
    for i in sorted(range(len(activities)), key=lambda i: activities[i].start_s):
        ends = free_s.setdefault(activities[i].executor, [])
        open_lanes = (j for j, end in enumerate(ends) if end <= activities[i].start_s + ROUNDING_S)
        lanes[i] = next(open_lanes, len(ends))
        ends[lanes[i] : lanes[i] + 1] = [activities[i].end_s]
    return lanes


def _summary(forecast: Forecast) -> str:
    fits = "fits" if forecast.memory.fits else "does not fit"
    return (
        f"{forecast.num_gpus} GPU{'s' * (forecast.num_gpus != 1)}; {fits}; "
        f"{forecast.step.step_s:.1f} s a step; a publish takes {forecast.publish.seconds:.2f} s."
    )


def _step_words(step: StepForecast) -> str:
    """What is drawn, and the figures of one step."""
    start_s = min(activity.start_s for activity in step.timeline)
    drawn_s = max(activity.end_s for activity in step.timeline) - start_s
    busy = ", ".join(f"{name} {share:.0%}" for name, share in step.busy_shares.items())
    return escape(
        f"{step.step_s:.2f} s a step, {step.trained_tokens_per_s:,.0f} tokens/s trained; busy: "
        f"{busy}; staleness of a token {step.mean_staleness:.2f} on average, at most "
        f"{step.max_staleness}. Drawn: {drawn_s / step.step_s:.1f} steps once the pipeline is "
        "full; seconds from the left edge."
    )


def _colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name; of more than there are, the last ones share."""
    return {name: COLOURS[min(i, len(COLOURS) - 1)] for i, name in enumerate(dict.fromkeys(names))}


def _bar(
    name: str, tip: str, colour: str, start: float, length: float, top: float
) -> Iterator[str]:
    """A box, and its name inside if there is room for it."""
    left = LEFT + start
    yield (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(length, 0.3):.1f}" height="{BAR}" '
        f"fill={quoteattr(colour)}><title>{escape(tip)}</title></rect>"
    )
    if length > LETTER * (len(name) + 1):
        ink = "#000000" if _is_light(colour) else "#ffffff"
        yield (
            f'<text x="{left + length / 2:.1f}" y="{top + BAR / 2 + 4:.1f}" '
            f'text-anchor="middle" pointer-events="none" style="fill: {ink}">{escape(name)}</text>'
        )


def _label(text: str, top: float) -> str:
    """An executor's name, cut to the column left of the drawing."""
    most = int(LEFT / LETTER) - 2
    short = text if len(text) <= most else text[: most - 1] + "\u2026"
    return f'<text x="0" y="{top + BAR / 2 + 4:.1f}">{escape(short)}</text>'


def _ticks(most: float, scale: float, height: int, unit: str) -> Iterator[str]:
    """About eight round values along the bottom."""
    step = 10.0 ** math.floor(math.log10(max(most, 1e-9) / 8))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 8)
    for i in range(int(most / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 18}"/>'
        yield f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{i * step:g} {unit}</text>'


def _keys(colours: Mapping[str, str]) -> str:
    keys = (
        f'<span class="key"><i style="background: {colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f"<p>{' '.join(keys)}</p>"


def _is_light(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140
