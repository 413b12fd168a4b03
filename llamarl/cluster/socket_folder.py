"""The folder of Monarch's named sockets, in that for temporary files.

Owns: one folder per process, for this user only, and removing those of processes that have ended,
however they ended. Does not own: the sockets, which Monarch makes and leaves there. Invariant: the
folder of a living process is locked by it, so no other removes that, not even from a container with
process ids of its own; and nothing but sockets and folders without other files is removed.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".llamarl-"
MOST_CHARS = 107  # of a socket's path
ADDED_CHARS = len(f"/{PREFIX}12345678/.tmp123456/12345678901")  # by us and Monarch


@contextmanager
def private_sockets() -> Iterator[None]:
    """Monarch makes its named sockets in this block: in a folder of this process, for this user
    only, whatever the process's own mask lets others do."""
    remove_left()
    umask, before = os.umask(0o077), os.environ.get("TMPDIR")
    try:
        if len(tempfile.gettempdir()) + ADDED_CHARS <= MOST_CHARS:
            os.environ["TMPDIR"] = _make()  # Monarch asks for it when it makes the first socket
        yield
    finally:
        os.umask(umask)
        os.environ.pop("TMPDIR", None)
        if before is not None:
            os.environ["TMPDIR"] = before


def remove_left() -> None:
    """Remove the folders that processes of this user have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, one at work, or one with other files
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _remove(folder, descriptor)
            finally:
                os.close(descriptor)


def _remove(folder: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for path in folder.glob("*/*"):
        if path.is_socket():
            path.unlink()
    for path in [*folder.iterdir(), folder]:
        path.rmdir()


def _make() -> str:
    """A new folder, which stays locked as long as this process lives."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks, where none is ever removed
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # else `remove_left` of another process was between
            return folder
        os.close(descriptor)
