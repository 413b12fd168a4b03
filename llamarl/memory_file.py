"""Files in memory, which have no name, and reading and writing the bytes of any open file.

Owns: making such a file, and that a call moves all the bytes it was given. Does not own: what lies
in a file, which process gets it, files on disk. Invariant: nothing is left behind, whichever
process is killed and when: the kernel frees a file in memory with its last descriptor and mapping.
"""

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Buffer = Any  # np.ndarray or memoryview, contiguous: what has `nbytes`

HAS_MEMORY_FILES = hasattr(os, "memfd_create")  # else they lie on the disk
MAX_BUFFERS = 1024  # of one system call


def memory_file(label: str = "llamarl", *, can_be_sealed: bool = False) -> int:
    """The descriptor of a new file, whose `label` shows in /proc/PID/maps."""
    if HAS_MEMORY_FILES:
        sealing = os.MFD_ALLOW_SEALING if can_be_sealed else 0
        return os.memfd_create(label, os.MFD_CLOEXEC | sealing)
    with tempfile.TemporaryFile() as on_disk:
        return os.dup(on_disk.fileno())


@contextmanager
def sealed_file(text: str) -> Iterator[int]:
    """The descriptor of a file with `text`, at its start, that nobody can change. Linux alone has
    seals."""
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
    """A new file of zeros whose pages are all reserved now, so that no later write can fail.
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
    """Write contiguous `buffers` one after another from `offset` on; how many bytes that was."""
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
    """The first bytes of a file as read-only memory, which outlives the descriptor. `dropped` is
    called, on any thread, once nothing refers to it any more."""
    mapped = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
    if dropped is not None:
        weakref.finalize(mapped, dropped).atexit = False
    return memoryview(mapped)
