"""What a storage unit is constructed with: a frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Retired rows of storage unit `unit` go to `archive_folder` (None: nowhere), see
    `storage/archive.py`. Clients on the unit's host find it at `socket` (None: it answers calls
    only). Above `max_bytes` in memory (0: no limit) rows go
    to files in `spill_folder` (None: they stay)."""

    executor: ClassVar[str] = "llamarl.storage.worker:StorageExecutor"

    unit: int
    archive_folder: str | None
    socket: str | None = None
    spill_folder: str | None = None
    max_bytes: int = 0
