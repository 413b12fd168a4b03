"""Whether storage has room for more rollouts.

Owns: how often storage is asked, and the warning. Does not own: what it may hold (`storage/`), or
what is asked for without room (`gate.py`). Invariant: storage is asked once in ROOM_PAUSE_S at
most.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field

from llamarl.loop.gate import ROOM_PAUSE_S
from llamarl.protocols import Storage
from llamarl.repeated_warnings import RepeatedWarnings

log = logging.getLogger(__name__)


@dataclass
class Room:
    """`await room()` is False while a storage unit holds all that it may and cannot move rollouts
    to disk, and the log says so. It asks once in ROOM_PAUSE_S at most."""

    storage: Storage
    _next_s: float = -math.inf
    _is_full: bool = False
    _warnings: RepeatedWarnings = field(default_factory=lambda: RepeatedWarnings(log))

    async def __call__(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_s:
            self._next_s = now_s + ROOM_PAUSE_S
            usage = await self.storage.usage()
            if usage["is_full"] and not self._is_full:
                self._warnings.warn(
                    "storage is full (%.1f GiB in memory, %.1f GiB on disk): no more than the "
                    "next step's rollouts are asked for until that changes",
                    usage["memory_bytes"] / 2**30,
                    usage["spilled_bytes"] / 2**30,
                )
            self._is_full = usage["is_full"] > 0
        return not self._is_full
