"""How much memory processes have, seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path


def shared_out_bytes(pid: int) -> int:
    """Memory that is no file's; what n processes share counts as an n-th."""
    return _bytes(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"))


def private_bytes(pid: int) -> int:
    """Memory that is no file's and that no other process shares."""
    return _bytes(Path(f"/proc/{pid}/status"), ("RssAnon:",))


def _bytes(path: Path, fields: tuple[str, ...]) -> int:
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith(fields)]
    return sum(int(words[1]) for words in lines) * 1024


class Peaks:
    """Largest sizes seen: of all processes together, of each one's private memory."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.total_bytes = 0
        self.private_bytes = dict.fromkeys(pids, 0)

    def look(self) -> None:
        self.total_bytes = max(self.total_bytes, sum(map(shared_out_bytes, self._pids)))
        for pid in self._pids:
            self.private_bytes[pid] = max(self.private_bytes[pid], private_bytes(pid))

    async def watch(self, every_s: float = 0.02) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(every_s)
