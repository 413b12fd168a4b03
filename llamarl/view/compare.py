"""`llamarl compare RUN RUN`: it shows two or more runs in one picture and one table."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

from llamarl.core.fields import require
from llamarl.core.files import read_object
from llamarl.core.groups import Share
from llamarl.metrics.estimates import with_interval
from llamarl.metrics.held_out import ACCURACY, EVALUATION, share_words
from llamarl.metrics.provenance import CONFIG_FILE, ENVIRONMENT_FILE
from llamarl.metrics.rendering import duration
from llamarl.metrics.step_metrics import (
    HELD_OUT_LOSS,
    STEP_S,
    TOKENS_PER_S,
    TRAIN_LOSS,
    TRAINED_TOKENS,
    tokens_per_s,
)
from llamarl.metrics.trackers import METRICS_FILE, read_metrics
from llamarl.view.page import is_number

Points = Sequence[tuple[float, float]]
"""The points (step, value) of a curve, in the order of the steps."""
Curve = tuple[str, Points, str]
"""The name of a curve, which stands beside the chart, its points and its colour."""

WIDTH, HEIGHT = 440, 250  # of one chart, pixels
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 40
LINE = 16  # height of a name
MOST_TICKS = 5
COLOURS = ("#2f7ed8", "#e07b39", "#3a9d5d", "#9b59b6", "#c0392b", "#16a2b8", "#8a6d3b", "#8a8f98")


def picture(charts: Sequence[str], names: Sequence[tuple[str, str]] = ()) -> str:
    """Return a whole SVG file with these charts in a row and, above them, each of the `names` with
    its colour on a line of its own."""
    width, top = WIDTH * len(charts), LINE * len(names) + (LINE if names else 0)
    body = "".join(
        f'<g transform="translate({WIDTH * place} {top})">{each}</g>'
        for place, each in enumerate(charts)
    )
    head = "".join(
        f'<rect x="{LEFT}" y="{LINE * place + 8}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{LEFT + LINE}" y="{LINE * place + 17}" fill="#333">{escape(name)}</text>'
        for place, (name, colour) in enumerate(names)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + top}" '
        f'width="{width}" height="{HEIGHT + top}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{head}{body}</svg>\n'
    )


def chart(
    title: str,
    highest: float,
    curves: Sequence[Curve],
    *,
    lowest: float = 0.0,
    marked: Sequence[str] = (),
    bars: Sequence[tuple[float, float, float, str]] = (),
) -> str:
    """Return one chart from `lowest` to `highest`. Curves that have a name get it at the lower
    right; each point of those in `marked` is marked, and has its value. `bars` are intervals: step,
    low, high and colour."""
    last = max((step for _, points, _ in curves for step, _ in points), default=1) or 1
    height = (highest - lowest) or 1.0

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - lowest) / height * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<text x="{LEFT}" y="20" fill="#333" font-weight="bold">{escape(title)}</text>']
    for tick in range(5):
        value = lowest + height * tick / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}" '
            f'stroke="#e3e5e8"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4}" fill="#666" '
            f'text-anchor="end">{value:.4g}</text>'
        )
    steps = range(0, int(last) + 1, int(_round_number(max(1.0, last / MOST_TICKS))))
    axis = [(x(step), HEIGHT - BOTTOM + 18, f"{step}") for step in steps]
    axis.append(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "optimizer step"))
    parts += [
        f'<text x="{left}" y="{top}" fill="#666" text-anchor="middle">{words}</text>'
        for left, top, words in axis
    ]
    parts += [
        f'<line x1="{x(step)}" x2="{x(step)}" y1="{y(low)}" y2="{y(high)}" stroke="{colour}" '
        f'stroke-width="6" stroke-opacity="0.35"/>'
        for step, low, high, colour in bars
    ]
    for place, (label, points, colour) in enumerate(curves):
        line = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if label in marked:
            parts += [
                f'<circle cx="{x(step)}" cy="{y(value)}" r="3.5" fill="{colour}"/>'
                f'<text x="{x(step)}" y="{y(value) + (16 if step else -9)}" fill="{colour}" '
                f'text-anchor="{"start" if not step else "end" if step == last else "middle"}">'
                f"{value:.1f}</text>"
                for step, value in points
            ]
        if label:
            parts.append(
                f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM - 26 + LINE * place}" '
                f'fill="{colour}" text-anchor="end">{escape(label)}</text>'
            )
    return "".join(parts)


def round_up(value: float) -> float:
    """Return the least value from `value` on whose quarter is a round number."""
    return 4 * _round_number(value / 4, (1, 2, 2.5, 5, 10, 20)) if value > 0 else 1.0


def _round_number(least: float, times: Sequence[float] = (1, 2, 5, 10, 20)) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in times if each * power >= least)


USAGE = """usage: llamarl compare RUN RUN [RUN ...] [--output FILE]

Draws the curves of the runs in these folders as one picture, compare.svg or FILE, and prints a
table of what they reached and one of what differs in their configs. A run may be at work.
"""
PICTURE_FILE = "compare.svg"
ALWAYS_DIFFERENT = ("run_dir", "recipe_dir")
DIGEST_CHARS = 12
MOST_CHARS = 60  # of a value in a table
LENGTH = "length/mean"
REWARD, STALENESS, MOST_STALE = "reward/mean", "staleness/mean", "staleness/max"
TAGS = [EVALUATION, STEP_S, TOKENS_PER_S, LENGTH, REWARD, STALENESS, MOST_STALE]
TAGS += [TRAINED_TOKENS, TRAIN_LOSS, HELD_OUT_LOSS]
CHARTS = {  # title: tag, factor
    "held-out accuracy, %": (f"{EVALUATION}{ACCURACY}", 100),
    "training reward": (REWARD, 1),
    "held-out loss": (HELD_OUT_LOSS, 1),
    "training loss": (TRAIN_LOSS, 1),
    "answer length, tokens": (LENGTH, 1),
}


@dataclass(frozen=True)
class ComparedRun:
    """The metrics of one run by step, and its config by dotted key, with the choice of each group
    and the digests of task.py and its neighbours."""

    name: str
    steps: dict[int, dict[str, float]]
    config: dict[str, Any]

    def points(self, tag: str) -> Points:
        """Return (step, value) of every step that has a value."""
        return [(step, line[tag]) for step, line in self.steps.items() if tag in line]

    def last(self, tag: str, form: str) -> str:
        """Return the last value in words, a dash where there is none."""
        return format(self.points(tag)[-1][1], form) if self.points(tag) else "-"

    def lines(self, *tags: str) -> list[dict[str, float]]:
        """Return the metrics of each step that has all of these tags."""
        return [line for line in self.steps.values() if line.keys() >= {*tags}]


def compare(arguments: list[str]) -> str:
    """Draw the picture; return the text that the command prints. ValueError, in one line, says what
    is wrong with the arguments or a folder."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--output", default=PICTURE_FILE)
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"the arguments of compare must be as --help says, got: {error}") from None
    require(not rest, "the arguments of compare", "be RUN RUN and --output FILE", " ".join(rest))
    folders = options.runs
    must = "be followed by the folders of two or more runs"
    require(len(folders) >= 2, "llamarl compare", must, " ".join(folders) or "none")
    names = [Path(each).resolve().name for each in folders]
    if len({*names}) < len(names):
        names = folders
    names = [*map(_plain, names)]
    runs = [read_run(Path(each), name) for each, name in zip(folders, names, strict=True)]
    output = Path(options.output)
    try:
        output.write_text(draw(runs))
    except OSError as error:
        raise ValueError(f"--output must name a file that can be written, got {error}") from error
    head, difference = ["", *names], "their configs are equal, and so is their task.py\n"
    if differing := differences(runs):
        difference = "what differs in their configs:\n" + _table(head, differing)
    return "\n".join([_table(head, figures(runs)), difference, f"{output}\n"])


def read_run(folder: Path, name: str) -> ComparedRun:
    """Read a run's folder. ValueError, in one line, for a folder that is not that of a run, or
    damaged."""
    must = "RUN must be the folder of a run"
    if not folder.is_dir():
        raise ValueError(f"{must}, got {folder}")
    for needed in (METRICS_FILE, CONFIG_FILE):
        if not (folder / needed).is_file():
            raise ValueError(f"{must}, got {folder} without {needed}")
    try:
        read = yaml.safe_load((folder / CONFIG_FILE).read_bytes())
        config = _by_key(read) if isinstance(read, dict) else None
        lines = read_metrics(folder / METRICS_FILE, TAGS)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        got = " ".join(str(error).split())[:MOST_CHARS]
        raise ValueError(f"{must} that can be read, got {folder}: {got}") from error
    if config is None:
        got = type(read).__name__
        raise ValueError(f"{folder / CONFIG_FILE} must hold keys with their values, got {got}")
    steps = {
        step: {
            tag: value
            for tag, value in line.items()
            if is_number(value) and not (tag == LENGTH and TRAIN_LOSS in line)  # of no answers
        }
        for step, line in lines.items()
    }
    run = ComparedRun(name, steps, config | _digests(folder))
    if not any(run.points(tag) for tag, _ in CHARTS.values()):
        raise ValueError(f"{must} that has trained a step, got {folder}")
    return run


def _by_key(config: dict[Any, Any]) -> dict[str, Any]:
    """Return the choice of each group, and the values by dotted key. TypeError, ValueError or
    RecursionError if one of them has no JSON."""
    entries = config.get("defaults", [])
    choices = {
        str(key).rpartition(" ")[2].strip("/"): choice
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        for key, choice in entry.items()
    }
    found = choices | _flat({key: each for key, each in config.items() if key != "defaults"})
    json.dumps([*found.values()], default=str)
    return found


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each module of Python that the run used of its recipe, by its path
    there."""
    try:
        found = read_object(folder / ENVIRONMENT_FILE)["recipe"]["sha256"]
        texts = {name: digest[:DIGEST_CHARS] for name, digest in found.items()}
        return {name: text for name, text in texts.items() if name.endswith(".py")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # an old one
        return {}


def figures(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Return the results of the runs: a row per figure that one of them has, in which a dash stands
    for a figure that a run does not have."""
    rows: dict[str, Callable[[ComparedRun], str]] = {
        "steps": lambda run: f"{max(run.steps)}",
        "time of the steps": _time,
    }
    tags = dict.fromkeys(tag for run in runs for line in run.steps.values() for tag in line)
    for tag in (tag for tag in tags if f"{tag}_low" in tags):
        label = f"held-out {share_words(tag.removeprefix(EVALUATION))}"
        rows[label] = partial(_share, tag)
    rows |= {
        "held-out loss": lambda run: run.last(HELD_OUT_LOSS, ".4f"),
        "training loss": lambda run: run.last(TRAIN_LOSS, ".4f"),
        "training reward": lambda run: run.last(REWARD, ".3f"),
        "tokens/s trained": _rate,
        "token staleness": _staleness,
        "answer length": lambda run: run.last(LENGTH, ".1f"),
    }
    found = [[label, *map(words, runs)] for label, words in rows.items()]
    return [row for row in found if {*row[1:]} != {"-"}]


def differences(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Return a row per key whose values differ; a dash stands for a key that a config does not
    have."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in ALWAYS_DIFFERENT)
    rows = [
        [_one_line(key), *(_one_line(c[key]) if key in (c := run.config) else "-" for run in runs)]
        for key in keys
    ]
    return [row for row in rows if len({*row[1:]}) > 1]


def draw(runs: Sequence[ComparedRun]) -> str:
    """Return the picture, with the charts for which some run has values."""
    coloured = [*zip(runs, cycle(COLOURS), strict=False)]
    charts = []
    for title, (tag, factor) in CHARTS.items():
        low, high = f"{tag}_low", f"{tag}_high"
        curves = [
            ("", [(step, factor * value) for step, value in run.points(tag)], colour)
            for run, colour in coloured
        ]
        bars = [
            (step, factor * line[low], factor * line[high], colour)
            for run, colour in coloured
            for step, line in run.steps.items()
            if line.keys() >= {low, high}
        ]
        if values := [value for _, points, _ in curves for _, value in points]:
            highest = 100.0 if factor == 100 else round_up(max(values))
            charts.append(chart(title, highest, curves, lowest=min(0.0, *values), bars=bars))
    return picture(charts, [(run.name, colour) for run, colour in coloured])


def _flat(value: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, each in value.items():
        key = f"{prefix}{name}"
        flat |= _flat(each, f"{key}.") if isinstance(each, dict) and each else {key: each}
    return flat


def _share(tag: str, run: ComparedRun) -> str:
    """Return the last share with its interval, and its step."""
    found = {step: line for step, line in run.steps.items() if tag in line}
    if not found:
        return "-"
    step, line = [*found.items()][-1]
    value = line[tag]
    ends = [line.get(f"{tag}_{end}", value) for end in ("low", "high")]
    return f"{with_interval(Share(value, *ends))} at step {step}"


def _time(run: ComparedRun) -> str:
    seconds = sum(value for _, value in run.points(STEP_S))
    return duration(seconds) if math.isfinite(seconds) else "-"


def _rate(run: ComparedRun) -> str:
    rate = tokens_per_s(run.lines(TOKENS_PER_S, STEP_S))
    return "-" if rate is None else f"{rate:,.0f}"


def _staleness(run: ComparedRun) -> str:
    """Return the mean staleness over trained tokens, and the largest."""
    lines = run.lines(STALENESS, MOST_STALE)
    num_tokens = sum(line.get(TRAINED_TOKENS, 0) for line in lines)
    if num_tokens <= 0:
        return "-"
    mean = sum(line[STALENESS] * line.get(TRAINED_TOKENS, 0) for line in lines) / num_tokens
    return f"mean {mean:.2f}, max {max(line[MOST_STALE] for line in lines):g}"


def _one_line(value: Any) -> str:
    text = _plain(value)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."


def _plain(value: Any) -> str:
    """Return a text as it is, if it has one line and nothing that a terminal obeys; anything else
    as JSON."""
    is_plain = isinstance(value, str) and value.isprintable()
    return value if is_plain else json.dumps(value, default=str)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return "".join(f"{line}\n" for line in lines)
