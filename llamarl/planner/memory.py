"""How much memory every rank needs, by kind.

Owns: what lies in memory when, for trainer, generator and reference. Does not own: the sizes of
parameters on a rank (`placements.py`) or of activations (`activations.py`). Invariant: each kind
mirrors the code that allocates it, which its comment names.
"""

from __future__ import annotations

from llamarl.config import Config
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import MemoryForecast


def forecast_memory(config: Config, architecture: Architecture) -> MemoryForecast:
    """The fullest rank of every executor, and what to change if one does not fit.

    ValueError if `cluster.gpu` is unknown or the ranks do not fit onto the hosts.
    """
    raise NotImplementedError
