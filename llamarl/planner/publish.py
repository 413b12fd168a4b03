"""What one publish moves, and how long that takes.

Owns: bytes per rank and per network card, and seconds from them. Does not own: which copies there
are (`weights/plan.py`) or constants of hardware (`hardware.py`). Invariant: bytes come from real
plans; seconds come from bytes and named constants alone.
"""

from __future__ import annotations

from llamarl.config import Config
from llamarl.models.architecture import Architecture
from llamarl.planner.forecast import PublishForecast


def forecast_publish(config: Config, architecture: Architecture) -> PublishForecast:
    """One version from the trainer to all replicas."""
    raise NotImplementedError
