"""Packets between two processes of one host, with open files attached.

Owns: the kind of socket, who is at its other end, and the form of a packet. Does not own: what
packets mean. Invariant: a packet arrives whole or not at all; what is too large for one travels as
a file in memory, of which only the descriptor is sent, so the receiver has the sender's bytes
without a copy.

A packet is the length of its header, the header (JSON), and the body, which is raw bytes.
"""

import asyncio
import errno
import json
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.memory_file import Buffer, map_file, memory_file, write_all

MAX_PACKET_BYTES = 64 * 1024  # well below what a socket's buffer holds by default (208 KiB)
MAX_FILES = 64  # of one packet; the kernel takes 253, and a receiver may have 1024 open at once
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of a peer
PREFIX = struct.Struct("<I")
MAX_HEADER_BYTES = 32 * 1024  # a longer one travels as a file too
BODY_BYTES = "body_bytes"  # in a header: the body is the first file, and so long
HEADER_BYTES = "header_bytes"  # alone in a header: the real one is the last file, and so long


@dataclass(slots=True)
class Packet:
    """What came in one piece. Whoever has it closes its `files`."""

    header: dict[str, Any]
    body: memoryview
    files: list[int]
    channel: "Channel" = field(repr=False)  # by which it came

    @property
    def body_file(self) -> tuple[int, int] | None:
        """(descriptor, bytes) if the body is the first file."""
        num_bytes = self.header.get(BODY_BYTES)
        return None if num_bytes is None else (self.files[0], num_bytes)

    def open_body(self) -> memoryview:
        """The body, wherever it is; read-only."""
        if self.body_file is None:
            return self.body
        return map_file(*self.body_file)

    def close(self) -> None:
        """Close its files; what was mapped of them stays readable."""
        while self.files:
            os.close(self.files.pop())


class Channel:
    """One end of a connection; all its methods belong to the event loop it was made on.

    `receive` is called with each packet, `closed` once, when the other end is gone.
    """

    def __init__(
        self,
        connection: socket.socket,
        receive: Callable[[Packet], None],
        closed: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._receive, self._closed = receive, closed
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._on_readable)

    def send(
        self,
        header: dict[str, Any],
        body: Sequence[Buffer] = (),
        files: Sequence[int] = (),
        spare: Callable[[], int] | None = None,
    ) -> None:
        """Send now, or as soon as the other end reads. `files` stay the caller's; `spare` gives one
        that a large body may be written into.

        OSError if there is no memory for a large body.
        """
        num_bytes = sum(each.nbytes for each in body)
        text = json.dumps(header, default=str).encode()  # dates of a data row become text
        is_long = len(text) > MAX_HEADER_BYTES
        own: list[int] = []  # files that are closed here
        try:
            if PREFIX.size + min(len(text), MAX_HEADER_BYTES) + num_bytes > MAX_PACKET_BYTES:
                own.append(memory_file() if spare is None else spare())
                write_all(own[0], body, 0)
                text, body = json.dumps(header | {BODY_BYTES: num_bytes}).encode(), ()
                files = own[0], *files
            if is_long:
                own.append(memory_file())
                write_all(own[-1], [memoryview(text)], 0)
                text = json.dumps({HEADER_BYTES: len(text)}).encode()
                files = *files, own[-1]
            data = b"".join([PREFIX.pack(len(text)), text, *body])
            if self._unsent or not self._has_sent(data, files):
                self._unsent.append((data, [os.dup(each) for each in files]))
        finally:
            _close_all(own)

    def close(self) -> None:
        """Hang up. What was not sent yet is dropped, and `closed` is not called."""
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        for _, files in self._unsent:
            _close_all(files)
        self._unsent.clear()

    def _lose(self) -> None:
        self.close()
        self._closed()

    def _on_writable(self) -> None:
        while self._unsent and self._has_sent(*self._unsent[0]):
            _close_all(self._unsent.popleft()[1])
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _has_sent(self, data: bytes, files: Sequence[int]) -> bool:
        """False if it must wait until the other end has read."""
        try:
            socket.send_fds(self._connection, [data], files)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._on_writable)
            return False
        except (BrokenPipeError, ConnectionResetError):  # the reader finds it too
            pass
        return True

    def _on_readable(self) -> None:
        try:
            data, rights, flags, _ = self._connection.recvmsg(
                MAX_PACKET_BYTES,
                socket.CMSG_SPACE(MAX_FILES * array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return
        except OSError:
            return self._lose()
        files = array("i")
        for _, _, descriptors in rights:
            files.frombytes(descriptors)
        if not data or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            _close_all(files)  # truncated: this process has too many files open
            return self._lose()
        (num_bytes,) = PREFIX.unpack_from(data)
        start = PREFIX.size + num_bytes
        header = json.loads(data[PREFIX.size : start])
        if HEADER_BYTES in header:
            file = files.pop()
            header = json.loads(bytes(map_file(file, header[HEADER_BYTES])))
            os.close(file)
        self._receive(Packet(header, memoryview(data)[start:], list(files), self))


@contextmanager
def new_socket(path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket, closed if the block raises, and another name of `path` in the block, for an address
    has room for about 100 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ExitStack() as undo:
            made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            yield made, f"/proc/self/fd/{folder}/{path.name}"
            undo.pop_all()
    finally:
        os.close(folder)


def user_of(peer: socket.socket) -> int:
    """The user id of the process at the other end of a unix socket, of which the kernel knows."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def check_user(peer: socket.socket) -> None:
    """PermissionError if another user, root included, is at the other end."""
    if user_of(peer) != os.geteuid():
        raise PermissionError(errno.EPERM, "the socket is another user's")


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
