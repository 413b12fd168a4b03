"""Files in memory without a name, which several processes map, and how much memory may still be
used."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Buffer = Any  # np.ndarray or memoryview, contiguous: what has `nbytes`

HAS_MEMORY_FILES = hasattr(os, "memfd_create")  # else they lie on the disk
MAX_BUFFERS = 1024  # of one system call


def memory_file(label: str = "llamarl", *, can_be_sealed: bool = False) -> int:
    """Return the descriptor of a new file, whose `label` shows in /proc/PID/maps."""
    if HAS_MEMORY_FILES:
        sealing = os.MFD_ALLOW_SEALING if can_be_sealed else 0
        return os.memfd_create(label, os.MFD_CLOEXEC | sealing)
    with tempfile.TemporaryFile() as on_disk:
        return os.dup(on_disk.fileno())


@contextmanager
def sealed_file(text: str) -> Iterator[int]:
    """Provide the descriptor of a file with `text`, at its start, that nobody can change. Only
    Linux has seals."""
    file = memory_file("program", can_be_sealed=True)
    try:
        with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as stream:
            stream.write(text)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def reserved_file(label: str, num_bytes: int) -> int:
    """Return a new file of zeros whose pages are all reserved now, so that no later write can fail.
    ValueError if the host has too little memory."""
    file = memory_file(label)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        raise ValueError(
            f"shared memory for {label} must have {num_bytes} bytes, got: {error.strerror}"
        ) from error
    return file


def write_all(file: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write contiguous `buffers` one after another from `offset` on; return the number of bytes."""
    start = offset
    for first in range(0, len(buffers), MAX_BUFFERS):
        some = buffers[first : first + MAX_BUFFERS]
        num_bytes = sum(each.nbytes for each in some)
        num_written = os.pwritev(file, some, offset)
        if num_written < num_bytes:  # a nearly full disk, or over 2 GiB in one call
            rest = memoryview(b"".join(some))
            while num_written < num_bytes:
                num_written += os.pwrite(file, rest[num_written:], offset + num_written)
        offset += num_bytes
    return offset - start


def read_all(file: int, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes from `start` on. EOFError if the file ends before."""
    while into.nbytes:
        num_bytes = os.preadv(file, [into], start)
        if num_bytes == 0:
            raise EOFError(f"a file must have {into.nbytes} bytes more from byte {start} on")
        start, into = start + num_bytes, into[num_bytes:]


def map_file(file: int, num_bytes: int, dropped: Callable[[], None] | None = None) -> memoryview:
    """Return the first bytes of a file as read-only memory, which outlives the descriptor.
    `dropped` is called, on any thread, once nothing refers to it any more."""
    mapped = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
    if dropped is not None:
        weakref.finalize(mapped, dropped).atexit = False
    return memoryview(mapped)


CGROUP = Path("/sys/fs/cgroup")  # where a container sees its own limits


def available_bytes() -> int:
    """Return the memory that this process may still use: the host's available memory or the
    container's rest, whichever is less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            host_bytes = int(line.split()[1]) * 1024
    return min([host_bytes, *_container_rest_bytes()])


def _container_rest_bytes() -> list[int]:
    """Return the bytes that the container's limit (cgroup v2) leaves, page cache counted as free;
    [] without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used_bytes = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return []
    cache_bytes = int(stat["inactive_file"]) + int(stat["active_file"])
    return [] if limit == "max" else [int(limit) - used_bytes + cache_bytes]
