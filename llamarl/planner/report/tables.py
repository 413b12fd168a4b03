"""Tables of the reports.

Owns: their looks. Does not own: what is in them. Invariant: the same on a terminal and in a file.
"""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100


def render(parts: Iterable[RenderableType]) -> str:
    """These one below the other, in lines of at most WIDTH characters."""
    with (console := Console(width=WIDTH, color_system=None)).capture() as capture:
        for part in parts:
            console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def make_table(title: str | None, *columns: str) -> Table:
    """With a column for the rows' names, then these."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
