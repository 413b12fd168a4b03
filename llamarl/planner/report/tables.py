"""Tables of the reports.

Owns: their looks. Does not own: what is in them. Invariant: the same on a terminal and in a file.
"""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100
GAP = 2  # between columns


def render(parts: Iterable[RenderableType]) -> str:
    """These one below the other, in lines of at most WIDTH characters, or what a `whole_words`
    table needs."""
    parts = [*parts]
    tables = [part for part in parts if isinstance(part, Table)]
    needed = [sum((each.min_width or 0) + GAP for each in table.columns) for table in tables]
    console = Console(width=max([WIDTH, *needed]), color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def whole_words(titles: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Table:
    """A table whose cells have lines of `room` characters, or of one longer word: a path or a
    column's name is never cut."""
    table = Table(box=None, pad_edge=False)
    wrapped = [
        [textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False) for cell in row]
        for row in rows
    ]
    for title, *cells in zip(titles, *wrapped, strict=True):
        longest = max(len(line) for lines in ([title], *cells) for line in lines)
        table.add_column(title, min_width=longest, no_wrap=True)
    for row in wrapped:
        table.add_row(*("\n".join(lines) for lines in row))
    return table


def make_table(title: str | None, *columns: str) -> Table:
    """With a column for the rows' names, then these."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
