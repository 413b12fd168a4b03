"""The log of the controller's process: which lines the console shows, and which a file keeps.

Owns: the handlers of this process. Does not own: what is logged, or the logs of executors, which
have processes of their own (`os_process.py`). Invariant: what a run prints is in its
logs/controller.log too, whether lines are printed or a display is drawn.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler

from llamarl.cluster.os_process import LOG_FORMAT, log_path

USER_CODE = "llamarl.user_code"  # logs what rewards and stages print


def show_warnings(console: Console, *, shows_user_code: bool) -> None:
    """Print warnings, and what the recipe's own code prints where no other process logs that."""

    def is_shown(record: logging.LogRecord) -> bool:
        is_user_code = shows_user_code and record.name.startswith(USER_CODE)
        return record.levelno >= logging.WARNING or is_user_code

    handler = RichHandler(console=console, show_path=False)  # never tears the live display
    handler.addFilter(is_shown)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("llamarl").setLevel(logging.INFO)
    logging.raiseExceptions = False  # of a full disk the run itself says one line


@contextmanager
def kept_log(run_dir: str) -> Iterator[None]:
    """Write the log to the run's folder too, after what is there."""
    path = log_path(f"{run_dir}/logs", "controller")
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(LOG_FORMAT)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
