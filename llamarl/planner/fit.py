"""Whether a recipe fits, asked before a run starts.

Owns: the refusal. Does not own: the forecast (`memory.py`). Invariant: torch is imported only if a
cheap bound cannot tell that all fits.
"""

from __future__ import annotations

from llamarl.config import Config
from llamarl.models.architecture import Architecture


def check_fit(config: Config, architecture: Architecture) -> None:
    """ValueError, in one line with numbers and what to change, if the recipe does not fit."""
    raise NotImplementedError
