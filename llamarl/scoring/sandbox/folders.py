"""The folders that sandboxes have meanwhile. Their process holds a lock on each, so that another
one can tell which of them a killed process has left."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

UNLOCKED = "new-"


@dataclass(frozen=True, slots=True)
class LockedFolder:
    """A folder of this process; `remove` unlocks it."""

    path: Path
    lock: int

    def remove(self) -> None:
        """Remove the folder; what cannot be removed is left to the next process that can."""
        try:
            remove(str(self.path))
        finally:
            os.close(self.lock)


def make_folder(prefix: str) -> LockedFolder:
    """Make an empty folder, whose name begins with this prefix once it is locked."""
    new = Path(tempfile.mkdtemp(prefix=UNLOCKED + prefix))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    flock(lock, LOCK_EX)
    return LockedFolder(new.rename(new.with_name(new.name.removeprefix(UNLOCKED))), lock)


def left_folders(prefix: str) -> Iterator[Path]:
    """Yield the folders with this prefix that killed processes of this user have left, each while
    no other process can take it for one of those."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or one at work
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    flock(lock, LOCK_EX | LOCK_NB)
                    yield folder
            finally:
                os.close(lock)


def remove_left(prefix: str) -> None:
    """Remove the folders with this prefix that killed processes of this user have left."""
    for folder in left_folders(prefix):
        remove(str(folder))


@functools.cache
def remove_left_once(prefix: str) -> None:
    """Do so at the first call in this process."""
    remove_left(prefix)


def remove(folder: str) -> None:
    """Remove a folder, however deep it is, as far as that can be done."""
    subprocess.run(["rm", "-rf", "--", folder], check=False, capture_output=True)
