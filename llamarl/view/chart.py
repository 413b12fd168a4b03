"""Charts as SVG: curves over optimizer steps.

Owns: how a chart looks. Does not own: which curves (`compare.py`, `tools/draw_pictures.py`).
Invariant: the text of a picture is a function of its curves alone, and no name in it is read as
markup.
"""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]
"""(step, value), in the order of the steps."""
Curve = tuple[str, Points, str]
"""Its name, which stands beside the chart, its points and its colour."""

WIDTH, HEIGHT = 440, 250  # of one chart, pixels
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 40
LINE = 16  # height of a name
MOST_TICKS = 5
COLOURS = ("#2f7ed8", "#e07b39", "#3a9d5d", "#9b59b6", "#c0392b", "#16a2b8", "#8a6d3b", "#8a8f98")


def picture(charts: Sequence[str], names: Sequence[tuple[str, str]] = ()) -> str:
    """A whole SVG file with these charts in a row and, above them, each of the `names` with its
    colour on a line of its own."""
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
    """One chart from `lowest` to `highest`. Curves that have a name get it at the lower right; of
    those in `marked` each point is marked, and has its value. `bars` are intervals: step, low, high
    and colour."""
    last = max((step for _, points, _ in curves for step, _ in points), default=1) or 1
    height = (highest - lowest) or 1.0

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - lowest) / height * (HEIGHT - TOP - BOTTOM), 1)

    parts = _axes(title, lowest, height, last, x, y)
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


def _axes(
    title: str,
    lowest: float,
    height: float,
    last: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    """The title, and lines and numbers of both axes."""
    parts = [f'<text x="{LEFT}" y="20" fill="#333" font-weight="bold">{escape(title)}</text>']
    for tick in range(5):
        value = lowest + height * tick / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}" '
            f'stroke="#e3e5e8"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4}" fill="#666" '
            f'text-anchor="end">{value:.4g}</text>'
        )
    for step in range(0, int(last) + 1, _tick(last)):
        parts.append(
            f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" fill="#666" '
            f'text-anchor="middle">{step}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" fill="#666" '
        f'text-anchor="middle">optimizer step</text>'
    )
    return parts


def round_up(value: float) -> float:
    """The least value from `value` on whose quarter is a round number."""
    return 4 * _round_number(value / 4, (1, 2, 2.5, 5, 10, 20)) if value > 0 else 1.0


def _tick(last: float) -> int:
    """The round number of steps from one tick to the next."""
    return int(_round_number(max(1.0, last / MOST_TICKS), (1, 2, 5, 10, 20)))


def _round_number(least: float, times: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in times if each * power >= least)
