"""A bar for the tokenising of large files, before a run has its display.

Owns: its look. Does not own: the work (`environments/prompt_cache.py`). Invariant: a console that
is no terminal gets one line, at its end.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@contextmanager
def tokenizing_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """What draws it: called with a file, how many of its pieces are done, and how many there are.
    The bar is gone once the block ends. CancelledError, in what calls it, once the present task was
    cancelled, as by Ctrl-C."""
    columns = TextColumn("tokenizing {task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}
    start_s = time.monotonic()

    def show(name: str, num_done: int, num_pieces: int) -> None:
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(name, total=num_pieces)
        bar.update(tasks[name], completed=num_done, refresh=True)
        if is_cancelled():
            raise asyncio.CancelledError

    try:
        yield show
    finally:
        bar.stop()
    if tasks:
        words = f"tokenized {', '.join(tasks)} in {time.monotonic() - start_s:.1f} s"
        console.print(words, markup=False, highlight=False, soft_wrap=True)


def is_cancelled() -> bool:
    """Whether the present task is to end, though it has not come to an `await` since."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # outside a loop
        return False
    return task is not None and task.cancelling() > 0
