"""llamarl: asynchronous reinforcement learning for pretrained language models.

Read `controller/controller.py` first: it is the whole loop. `core/records.py` holds the glossary.
For a loop of your own there is `llamarl.start_engines` (`cli/start_engines.py`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.cli.start_engines import LibraryEngines, start_engines

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a name of the library, imported on first use: importing llamarl alone loads next to
    nothing."""
    if name not in ("LibraryEngines", "start_engines"):
        raise AttributeError(f"module 'llamarl' has no attribute {name!r}")
    from llamarl.cli import start_engines as start

    return getattr(start, name)
