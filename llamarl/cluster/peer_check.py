"""The folder of Monarch's unix sockets, and the check that they serve processes of this user
only."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import mmap
import os
import platform
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from llamarl.cluster.sockets import user_of

PREFIX = ".llamarl-"
MOST_CHARS = 107  # of a socket's path
ADDED_CHARS = len(f"/{PREFIX}12345678/.tmp123456/12345678901")  # by us and Monarch


@contextmanager
def private_sockets() -> Iterator[None]:
    """Let Monarch make its named sockets, in this block, in a folder of this process, for this user
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
    """Return a new folder, which stays locked as long as this process lives."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks, where none is ever removed
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # else `remove_left` of another process was between
            return folder
        os.close(descriptor)


ACCEPT = "accept4"
GLOBAL_DATA_AND_JUMP_SLOT = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # kinds of relocations
LOAD, DYNAMIC = 1, 2  # kinds of segments
JUMP_BYTES, STRINGS, SYMBOLS, RELOCATIONS, RELOCATION_BYTES, JUMPS = 2, 5, 6, 7, 8, 23
SYMBOL_BYTES = 24
SEGMENT = np.dtype(  # of an ELF file of 64 bits; it lies in memory from address `start` on
    {
        "names": ["kind", "offset", "start", "size"],
        "formats": ["<u4", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 16, 32],
        "itemsize": 56,
    }
)
RELOCATION = np.dtype([("place", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
ACCEPT_TYPE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int), use_errno=True
)


@functools.cache
def refuse_other_users() -> None:
    """Check, from now on, who connects to Monarch's unix sockets of this process.

    Call it before Monarch listens. RuntimeError if its module is built in another way than this
    knows; does nothing except on Linux.
    """
    if platform.system() != "Linux":
        return
    from monarch import _rust_bindings

    path = os.path.realpath(str(_rust_bindings.__file__))
    slot = _base(path) + _find_slot(Path(path), ACCEPT)
    accept = ctypes.CDLL(None, use_errno=True).accept4
    accept.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    def accept_own(listening: int, address: int, length: int, flags: int) -> int:
        while (file := accept(listening, address, length, flags)) >= 0 and not _is_ours(file):
            os.close(file)
        return int(file)

    callback = ACCEPT_TYPE(accept_own)
    before = _write(slot, ctypes.cast(callback, ctypes.c_void_p).value or 0)
    # The interpreter's end must not meet a call; until then `callback` must live.
    atexit.register(lambda: (_write(slot, before), callback))


def _is_ours(file: int) -> bool:
    """Return whether the peer of this connection may be served; that of a TCP connection has to
    show a certificate instead."""
    try:
        connection = socket.socket(fileno=file)
        try:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            return is_tcp or user_of(connection) in (0, os.geteuid())
        finally:
            connection.detach()
    except BaseException:  # noqa: BLE001 - C calls this, so nothing may be raised
        return False


def _write(slot: int, address: int) -> int:
    """Set a pointer of a table that is read-only once the module is loaded; return the one
    before."""
    library = ctypes.CDLL(None, use_errno=True)
    page = slot // mmap.PAGESIZE * mmap.PAGESIZE
    where = ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE)
    pointer = ctypes.c_void_p.from_address(slot)
    before = pointer.value or 0
    for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
        if library.mprotect(*where, protection):
            raise RuntimeError(f"mprotect failed: {os.strerror(ctypes.get_errno())}")
        if protection & mmap.PROT_WRITE:
            pointer.value = address
    return before


def _base(path: str) -> int:
    """Return the address at which the module is loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == path and int(fields[2], 16) == 0:
            return int(fields[0].partition("-")[0], 16)
    raise RuntimeError(f"{path} must be loaded, got no memory of it")


def _find_slot(path: Path, name: str) -> int:
    """Return the offset, from the module's start, of the slot that holds the address of the C
    function `name`."""
    data = path.read_bytes()
    (headers,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    segments = np.frombuffer(data, SEGMENT, count, headers).tolist()

    def offset_of(address: int) -> int:
        for kind, offset, start, size in segments:
            if kind == LOAD and 0 <= address - start < size:
                return int(offset + address - start)
        raise RuntimeError(f"{path} must have its tables in memory, got none at {address:#x}")

    ((offset, size),) = ((each[1], each[3]) for each in segments if each[0] == DYNAMIC)
    tags = dict(struct.iter_unpack("<QQ", data[offset : offset + size]))
    strings, symbols = offset_of(tags[STRINGS]), offset_of(tags[SYMBOLS])
    kinds = GLOBAL_DATA_AND_JUMP_SLOT.get(platform.machine(), ())
    wanted = name.encode() + b"\0"
    for table, num_bytes in ((RELOCATIONS, RELOCATION_BYTES), (JUMPS, JUMP_BYTES)):
        count = tags.get(num_bytes, 0) // RELOCATION.itemsize
        entries = np.frombuffer(data, RELOCATION, count, offset_of(tags[table]) if count else 0)
        for place, _, symbol, _ in entries[np.isin(entries["kind"], kinds)].tolist():
            (start,) = struct.unpack_from("<I", data, symbols + symbol * SYMBOL_BYTES)
            if data.startswith(wanted, strings + start):
                return int(place)
    raise RuntimeError(f"{path} must call {name}, got no such function in its table")
