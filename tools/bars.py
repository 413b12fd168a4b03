"""The pictures of BENCHMARKS.md: horizontal bars of figures in docs/benchmarks/*.json.

Owns: which figures, and how bars look. Does not own: the figures. Invariant: every number that a
picture shows is a figure's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from harness import ROOT, number

WIDTH, LEFT, RIGHT, TOP = 880, 250, 150, 34
BAR, GAP = 17, 9  # pixels: a bar with the space below it, and the space between groups
COLOURS = ("#2f7ed8", "#e07b39", "#8a8f98")
Figure = Mapping[str, Any]
Groups = Mapping[str, Mapping[str, Figure]]
"""Label of a group -> series -> its figure."""


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    generate, weights, streams, store = map(figures, ("generate", "weights", "streams", "store"))
    batches = [f"{dtype}, batch {size}" for dtype in ("float32", "bfloat16") for size in (64, 8)]
    engines = {
        "embedded engine": "engine_tokens_per_s",
        "vLLM with log-probs": "vllm_with_logprobs_tokens_per_s",
        "vLLM as llamarl runs it": "llamarl_vllm_tokens_per_s",
    }
    ways = [case for name, case in weights if name == "way_s" and case.startswith("float32, ")]
    days = [case for name, case in streams if name == "async_vs_sync"]
    settings = [case for name, case in store if name == "own_ratio"]
    return {
        "generation.svg": draw(
            "tokens per second",
            {
                case: {series: generate[name, case] for series, name in engines.items()}
                for case in batches
            },
        ),
        "weights.svg": draw(
            "seconds of one version of 539 MB",
            {case.removeprefix("float32, "): {"": weights["way_s", case]} for case in ways},
        ),
        "asynchrony.svg": draw(
            "times as fast as the best synchronous run (line: lowest and highest pair)",
            {
                case: {
                    "asynchronous": streams["async_vs_sync", case],
                    "the most that the cores allow": streams["least_vs_sync", case],
                }
                for case in days
            },
        ),
        "store.svg": draw(
            "rows per second over those of TransferQueue",
            {
                case: {
                    "consumers of the run": store["own_ratio", case],
                    "loaders outside the run": store["loader_ratio", case],
                }
                for case in settings
            },
        ),
    }


def figures(name: str) -> dict[tuple[str, str], Figure]:
    """By name and case."""
    found = json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())["figures"]
    return {(each["name"], each.get("case", "")): each for each in found}


def draw(title: str, groups: Groups) -> str:
    """Bars from zero, each with its number and the line of its spread."""
    drawn = [figure for series in groups.values() for figure in series.values()]
    highest = max(max([each["value"], *each.get("spread", [])]) for each in drawn)
    scale = (WIDTH - LEFT - RIGHT) / highest
    names: Sequence[str] = list(next(iter(groups.values())))
    parts = [text(12, 20, title, "#333", weight="bold")]
    y = float(TOP)
    for place, name in enumerate(name for name in names if name):
        x = LEFT + place * 190
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLOURS[place]}"/>')
        parts.append(text(x + 16, y + 10, name, "#333"))
    y += 22 if names[0] else 0
    for label, series in groups.items():
        middle = y + BAR * len(series) / 2
        parts.append(text(LEFT - 8, middle + 2, label, "#333", anchor="end"))
        for colour, figure in zip(COLOURS, series.values(), strict=False):
            end = LEFT + scale * figure["value"]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 4}" '
                f'fill="{colour}"/>'
            )
            if spread := figure.get("spread"):
                first, last = (LEFT + scale * each for each in spread)
                parts.append(
                    f'<line x1="{first:.1f}" x2="{last:.1f}" y1="{y + 6.5}" y2="{y + 6.5}" '
                    'stroke="#333" stroke-width="1.5"/>'
                )
                end = max(end, last)
            shown = f"{number(figure['value'])} {figure['unit']}".rstrip()
            parts.append(text(end + 5, y + 11, shown, "#333"))
            y += BAR
        y += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" width="{WIDTH}" '
        f'height="{y:g}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, colour: str, anchor: str = "start", weight: str = "normal"
) -> str:
    """One label."""
    place = f'x="{x:.1f}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text {place} font-weight="{weight}">{escape(words)}</text>'
