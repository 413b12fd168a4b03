"""What a running program takes, read from outside: memory and threads of all its processes
together, and its scratch folder where no quota of the kernel bounds it.

Owns: how they are counted. Does not own: which processes belong to a program (`containers.py`),
what happens to one that takes too much (`contained.py`). Invariant: no file, folder or descriptor
is left out, and a count ends when it is above its limit, however much there is.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

KIB = 1024
PIPE_BYTES = 65_536  # that the kernel holds for each at most
SOCKET_LIMIT = Path("/proc/sys/net/core/wmem_default")  # the same for sockets
BLOCK_BYTES = 512  # of st_blocks
FILE_BYTES = 4096  # what each name in a folder counts at least
MAX_DEPTH = 64  # of folders: deeper ones are too much


def children(pid: int) -> set[int]:
    """Pids of the processes that `pid` has started. One that starts or ends at this moment may be
    missing."""
    found: set[int] = set()
    for task in _listed(f"/proc/{pid}/task"):
        with suppress(OSError):  # it has ended
            found |= {int(word) for word in Path(task, "children").read_text().split()}
    return found


def below(pid: int) -> set[int]:
    """Pids of the processes that `pid` has started, and of those that these have started."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def in_group(group: int) -> set[int]:
    """Pids of the processes of a process group, whoever their parents are."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.add(int(folder.name))
    return found


def num_threads(pids: Iterable[int]) -> int:
    """Threads of these processes together."""
    return sum(len(_listed(f"/proc/{pid}/task")) for pid in pids)


def memory_bytes(pids: Iterable[int], limit: int) -> int:
    """Memory of these processes, and of the kernel behind their pipes and sockets. Pages that
    several share count once where that decides whether it is above `limit`."""
    pids = [*pids]
    buffers = _buffer_bytes(pids)
    found = buffers + sum(_resident_bytes(pid) for pid in pids)
    return found if found <= limit else buffers + sum(_shared_out_bytes(pid) for pid in pids)


def disk_bytes(folder: str, pids: Iterable[int], limit: int) -> int:
    """Blocks of what is in a folder, and of files there that these processes have open or mapped
    though no folder has them any more. Above `limit` the rest is not counted."""
    pids = [*pids]
    found = dict(_mapped_and_gone(folder, pids)) | dict(_open_and_gone(pids))
    total = sum(found.values())
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for file, size in _below_folder(descriptor):
            total += FILE_BYTES if file in found else max(FILE_BYTES, size)
            found[file] = size
            if total > limit:
                break
    finally:
        os.close(descriptor)
    return total


def _listed(folder: str) -> list[str]:
    """Paths in a folder of /proc; none if it is gone."""
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _own_bytes(pid: int, file: str, names: tuple[str, str]) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(names)]
    return sum(map(int, found)) * KIB


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return _own_bytes(pid, "status", ("VmRSS:", "VmSwap:"))
    return 0


def _shared_out_bytes(pid: int) -> int:
    """Of a page that n processes share, one n-th, where the kernel tells."""
    with suppress(OSError):
        return _own_bytes(pid, "smaps_rollup", ("Pss:", "SwapPss:"))
    return _resident_bytes(pid)


def _descriptors(pids: Iterable[int]) -> Iterator[str]:
    """Paths below /proc of all that the threads of these processes have open."""
    for pid in pids:
        for task in _listed(f"/proc/{pid}/task"):
            yield from _listed(f"{task}/fd")


def _buffer_bytes(pids: Iterable[int]) -> int:
    names = set()
    for path in _descriptors(pids):
        with suppress(OSError):
            names.add(os.readlink(path))
    num_sockets = sum(name.startswith("socket:") for name in names)
    num_pipes = sum(name.startswith("pipe:") for name in names)
    socket_bytes = int(SOCKET_LIMIT.read_text()) if num_sockets else 0
    return num_pipes * PIPE_BYTES + num_sockets * socket_bytes


File = tuple[int, int]
"""(device, inode)."""


def _sized(found: os.stat_result) -> tuple[File, int]:
    return (found.st_dev, found.st_ino), found.st_blocks * BLOCK_BYTES


def _open_and_gone(pids: Iterable[int]) -> Iterator[tuple[File, int]]:
    for path in _descriptors(pids):
        with suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                yield _sized(found)


def _mapped_and_gone(folder: str, pids: Iterable[int]) -> Iterator[tuple[File, int]]:
    """The kernel does not tell their blocks: all up to the end of what is mapped."""
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                places, _, start, device, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(folder) and path[0].endswith(" (deleted)"):
                    first, last = (int(place, 16) for place in places.split("-"))
                    major, minor = (int(number, 16) for number in device.split(":"))
                    file = os.makedev(major, minor), int(inode)
                    yield file, int(start, 16) + last - first


def _below_folder(folder: int, depth: int = 0) -> Iterator[tuple[File, int]]:
    """All that is in an open folder and below it. No link is followed, and what has gone in the
    meantime is left out. What is too deep is given again and again."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):
                found = entry.stat(follow_symlinks=False)
                yield _sized(found)
                while depth > MAX_DEPTH:
                    yield _sized(found)
                if stat.S_ISDIR(found.st_mode):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                    inner = os.open(entry.name, flags, dir_fd=folder)
                    try:
                        yield from _below_folder(inner, depth + 1)
                    finally:
                        os.close(inner)
