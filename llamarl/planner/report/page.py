"""A forecast as one HTML page: the report, memory by kind, and what each executor does when.

Owns: the bars. Does not own: numbers, or the report's words (`text.py`). Invariant: the page is
well-formed XML and refers to nothing outside itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from llamarl.planner.forecast import Activity, Forecast

GIB = 2**30
MAX_ALIKE = 4  # executors of one kind in a timeline; the others do what these do
TURN_DEGREES = 137.5  # from one colour to the next: no two of the first dozens are alike

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; }
.row { position: relative; height: 24px; margin: 4px 0 4px 130px; background: #8882; }
.row b { position: absolute; left: -130px; font-weight: normal; }
.row i { position: absolute; height: 100%; overflow: hidden; font: 11px/24px system-ui;
  color: #000; opacity: 0.85; }
.row i.limit { border-left: 2px dashed #d55e00; }
"""

Bar = tuple[str, float, float]
"""A name, where it begins, how long it is."""


def draw_page(title: str, report: str, assumptions: Iterable[str], forecast: Forecast) -> str:
    """The whole page as text. `assumptions` are sentences on what the times rest on."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(report)}</pre>",
        *(f"<p>{escape(words)}</p>" for words in assumptions),
        "<h2>Memory of the fullest rank</h2>",
        *draw_memory(forecast),
    ]
    for name, step in {"as planned": forecast.step, **forecast.variants}.items():
        if step.timeline:
            body += [f"<h2>Timeline: {escape(name)}</h2>", *draw_timeline(step.timeline)]
    text = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{text}\n"
        "</body></html>\n"
    )


def draw_memory(forecast: Forecast) -> Iterator[str]:
    """One row per executor, cut by kind; a dashed line where the device ends."""
    ranks = forecast.memory.ranks
    most = max(max(rank.device_bytes, rank.total_bytes) for rank in ranks) / GIB
    rows: dict[str, list[Bar]] = {}
    for rank in ranks:
        begin, bars = 0.0, rows.setdefault(rank.executor, [])
        for kind, num_bytes in rank.bytes_by_kind.items():
            bars.append((kind, begin, num_bytes / GIB))
            begin += num_bytes / GIB
    limits = {rank.executor: rank.device_bytes / GIB for rank in ranks}
    return _rows(rows, most, "GiB", limits)


def draw_timeline(activities: Sequence[Activity]) -> Iterator[str]:
    """One row per executor, at most MAX_ALIKE of each kind ("generator-3" is a generator); seconds
    from the first activity's start."""
    origin = min(activity.start_s for activity in activities)
    rows: dict[str, list[Bar]] = {}
    for each in activities:
        bar = each.name, each.start_s - origin, each.end_s - each.start_s
        rows.setdefault(each.executor, []).append(bar)
    alike: dict[str, list[str]] = {}
    for executor in rows:
        alike.setdefault(executor.partition("-")[0], []).append(executor)
    shown = {name: rows[name] for names in alike.values() for name in names[:MAX_ALIKE]}
    yield from _rows(shown, max(activity.end_s for activity in activities) - origin, "s", {})
    if len(rows) > len(shown):
        yield f"<p>{len(rows) - len(shown)} more executors, which do alike, are not drawn.</p>"


def _rows(
    rows: Mapping[str, list[Bar]], most: float, unit: str, limits: Mapping[str, float]
) -> Iterator[str]:
    """A name has one colour in all rows; bars at the same time shine through each other."""
    names = list(dict.fromkeys(name for bars in rows.values() for name, *_ in bars))
    for label, bars in rows.items():
        yield f'<div class="row"><b>{escape(label)}</b>'
        for name, begin, length in bars:
            tip = quoteattr(f"{label}: {name}, {length:.2f} {unit} from {begin:.2f} {unit}")
            hue = names.index(name) * TURN_DEGREES % 360
            place = f"left: {100 * begin / most:.3f}%; width: {100 * length / most:.3f}%"
            yield f'<i style="{place}; background: hsl({hue} 60% 70%)" title={tip}>'
            yield f"{escape(name)}</i>"
        if label in limits:
            yield f'<i class="limit" style="left: {100 * limits[label] / most:.3f}%"></i>'
        yield "</div>"
    yield f"<p>{most:.1f} {unit} from edge to edge.</p>"
