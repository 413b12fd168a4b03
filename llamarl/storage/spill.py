"""What a storage unit does when its rows need more memory than it may take.

Owns: which slabs go to disk, and when. Does not own: rows. Invariant: a row is in memory until it
is wholly on disk, so a full disk costs no row; the files have no name, so they are gone with the
unit, and a file's space with its last row.
"""

import asyncio
import logging
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from llamarl.memory_file import read_all, write_all
from llamarl.repeated_warnings import RepeatedWarnings
from llamarl.storage.slabs import Slab, Slabs
from llamarl.storage.table import Table

log = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024 * 1024  # a file takes no more slabs then
COPIED_BYTES = 1024 * 1024  # at once
PAUSE_S = 10.0  # after the disk took nothing


class Spill:
    """Moves the oldest slabs whose rollouts are complete to files in `folder`, while all slabs in
    memory have more than `limit_bytes` (0: no limit)."""

    def __init__(self, table: Table, slabs: Slabs, folder: str | None, limit_bytes: int) -> None:
        self._table, self._slabs = table, slabs
        self._folder = Path(folder) if folder is not None else None
        self._limit_bytes = limit_bytes
        self.is_short = False  # the host has next to no memory left, whatever the limit
        self._file: Slab | None = None
        self._lock = asyncio.Lock()
        self._next_s = 0.0  # the disk was full: not before
        self._is_closed = False
        self._warnings = RepeatedWarnings(log)

    @property
    def is_over(self) -> bool:
        """Whether the slabs in memory should be fewer."""
        limit_bytes = 0 if self.is_short else self._limit_bytes or float("inf")
        return self._slabs.memory_bytes > limit_bytes

    async def relieve(self) -> None:
        """Return once no more slabs than allowed are in memory, or no further one can move."""
        async with self._lock:
            while self.is_over and not self._is_closed:
                self._slabs.drop_empty()
                may_move = self._folder is not None and time.monotonic() >= self._next_s
                slab = self._oldest() if self.is_over and may_move else None
                if slab is None:
                    return
                try:
                    await self._move(slab)
                except OSError as error:
                    return self._refuse(error)

    async def close(self) -> None:
        """Once what is under way has ended, move no more; remove the folder, unless another unit
        uses it."""
        self._is_closed = True
        async with self._lock:
            pass
        if self._folder is not None:
            with suppress(OSError):
                self._folder.rmdir()

    def _oldest(self) -> Slab | None:
        for slab in self._slabs.by_number.values():
            if not slab.is_spilled and slab.num_cells and self._table.is_complete(slab):
                if slab is self._slabs.shared:
                    self._slabs.shared = None
                return slab
        return None

    async def _move(self, slab: Slab) -> None:
        file = self._file
        if file is None or file.num_bytes + slab.num_bytes > FILE_BYTES or not file.num_cells:
            file = self._file = self._slabs.add(self._open(), is_spilled=True)
        slab.is_held = file.is_held = True
        start = file.end
        try:
            await asyncio.to_thread(_copy, slab, file.file, start)
            self._slabs.grow(file, start + slab.num_bytes)
            self._table.move(slab, file, start)
        except OSError:
            os.ftruncate(file.file, file.num_bytes)
            raise
        finally:
            for each in (slab, file):
                each.is_held = False
                self._slabs.free_if_empty(each)

    def _open(self) -> int:
        """A new file without a name."""
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        path = self._folder / uuid.uuid4().hex
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return file

    def _refuse(self, error: OSError) -> None:
        self._next_s = time.monotonic() + PAUSE_S
        self._warnings.warn(
            "%s takes no rollouts (%s): they stay in memory, and no new ones are asked for while "
            "that is over its limit (experience.max_bytes)",
            self._folder,
            error.strerror,
        )


def _copy(slab: Slab, file: int, start: int) -> None:
    """Copy a slab's bytes into another file; OSError if the disk is full."""
    memory = memoryview(bytearray(min(COPIED_BYTES, slab.num_bytes)))
    for offset in range(0, slab.num_bytes, COPIED_BYTES):
        some = memory[: slab.num_bytes - offset]
        read_all(slab.file, offset, some)
        write_all(file, [some], start + offset)
