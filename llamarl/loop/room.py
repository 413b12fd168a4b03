"""Whether storage has room for more rollouts.

Owns: asking, and saying so in the log. Does not own: what fills a unit (`storage/spill.py`), or
what waits (`gate.py`).
"""

import asyncio
import logging
import math

from llamarl.protocols import Storage

log = logging.getLogger(__name__)

ASK_S = 1.0  # between two questions at least


class Room:
    """`await room()` is False while a storage unit holds all that it may and cannot move rollouts
    to disk."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._next_s = -math.inf
        self._is_full = False

    async def __call__(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_s:
            self._next_s = now_s + ASK_S
            usage = await self._storage.usage()
            if usage["is_full"] and not self._is_full:
                log.warning(
                    "storage is full (%.1f GiB in memory, %.1f GiB on disk): no more than the "
                    "next step's rollouts are asked for until that changes",
                    usage["memory_bytes"] / 2**30,
                    usage["spilled_bytes"] / 2**30,
                )
            self._is_full = usage["is_full"] > 0
        return not self._is_full
