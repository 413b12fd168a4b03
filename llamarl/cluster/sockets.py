"""Sockets between processes of one user on one host: packets with open files attached, the server
that answers them, and a client's connection."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import socket
import struct
import traceback
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.core.errors import NotStored
from llamarl.core.memory import Buffer, map_file, memory_file, write_all

MAX_PACKET_BYTES = 64 * 1024  # well below what a socket's buffer holds by default (208 KiB)
MAX_FILES = 64  # of one packet; the kernel takes 253, and a receiver may have 1024 open at once
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of a peer
PREFIX = struct.Struct("<I")
MAX_HEADER_BYTES = 32 * 1024  # a longer one travels as a file too
BODY_BYTES = "body_bytes"  # in a header: the body is the first file, and so long
HEADER_BYTES = "header_bytes"  # alone in a header: the real one is the last file, and so long

Message = tuple[dict[str, Any], list[Buffer]]  # header, body


@dataclass(slots=True)
class Packet:
    """A message that came in one piece. Its holder must close its `files`."""

    header: dict[str, Any]
    body: memoryview
    files: list[int]
    channel: Channel = field(repr=False)  # by which it came

    @property
    def body_file(self) -> tuple[int, int] | None:
        """The descriptor and the bytes of the body, if it is the first file."""
        num_bytes = self.header.get(BODY_BYTES)
        return None if num_bytes is None else (self.files[0], num_bytes)

    def open_body(self) -> memoryview:
        """Return the body, wherever it is; read-only."""
        if self.body_file is None:
            return self.body
        return map_file(*self.body_file)

    def close(self) -> None:
        """Close its files; memory that was mapped from them stays readable."""
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
        """Send now, or as soon as the other end reads. `files` stay the caller's; `spare` returns a
        file that a large body may be written into.

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
        """Hang up. Unsent packets are dropped, and `closed` is not called."""
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
        """Send the packet; return False if it must wait until the other end has read."""
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
    """Provide a socket, closed if the block raises, and another name of `path` in the block, for an
    address has room for about 100 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ExitStack() as undo:
            made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            yield made, f"/proc/self/fd/{folder}/{path.name}"
            undo.pop_all()
    finally:
        os.close(folder)


def user_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket, as the kernel knows
    it."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def check_user(peer: socket.socket) -> None:
    """Raise PermissionError if another user, root included, is at the other end."""
    if user_of(peer) != os.geteuid():
        raise PermissionError(errno.EPERM, "the socket is another user's")


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


Answer = tuple[dict[str, Any], Sequence[Buffer], Sequence[int]]  # header, body, files
TRAVELLING: tuple[type[Exception], ...] = (NotStored, KeyError, ValueError, RuntimeError, OSError)


class LocalServer:
    """Listens at `path`; `answer` gets every packet, and its exceptions are raised at the client.

    `gone` is called when a client hangs up or dies. An answer that it still waits for is cancelled:
    `answer` must shield work that has to end all the same.
    """

    def __init__(
        self,
        path: Path,
        answer: Callable[[Packet], Awaitable[Answer] | Answer],
        gone: Callable[[Channel], None] = lambda channel: None,
    ) -> None:
        """Raises OSError if the folder's file system has no sockets."""
        self._path, self._answer, self._gone = path, answer, gone
        self._tasks: dict[Channel, set[asyncio.Task[None]]] = {}  # answers that clients wait for
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a killed session's
        with new_socket(path) as (self._socket, address):
            self._socket.setblocking(False)
            self._socket.bind(address)
            path.chmod(0o600)
            self._socket.listen(128)
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Hang up; remove the file, and the folder once it is empty."""
        if self._socket.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for channel in [*self._tasks]:
            channel.close()
            self._cancel(channel)
        with suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        try:
            check_user(connection)
        except PermissionError:  # root, or anybody if the file system knows no permissions
            return connection.close()
        channel = Channel(
            connection, lambda packet: self._receive(channel, packet), lambda: self._lose(channel)
        )
        self._tasks[channel] = set()

    def _lose(self, channel: Channel) -> None:
        self._cancel(channel)
        self._gone(channel)

    def _cancel(self, channel: Channel) -> None:
        for task in self._tasks.pop(channel):
            task.cancel()

    def _receive(self, channel: Channel, packet: Packet) -> None:
        number = packet.header["number"]
        try:
            answer = self._answer(packet)
        except Exception as error:  # noqa: BLE001 - the client raises it
            answer = describe(error)
        finally:
            packet.close()
        if isinstance(answer, tuple):
            self._reply(channel, number, answer)
        else:
            task = asyncio.ensure_future(self._reply_later(channel, number, answer))
            tasks = self._tasks[channel]
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _reply_later(self, channel: Channel, number: int, answer: Awaitable[Answer]) -> None:
        try:
            self._reply(channel, number, await answer)
        except Exception as error:  # noqa: BLE001 - the client raises it
            self._reply(channel, number, describe(error))

    def _reply(self, channel: Channel, number: int, answer: Answer) -> None:
        header, body, files = answer
        channel.send(header | {"number": number}, body, files)


def describe(error: Exception) -> Answer:
    """Return the error as an answer; one that a client cannot know becomes a RuntimeError."""
    kind = next((kind for kind in TRAVELLING if isinstance(error, kind)), None)
    args: list[Any] = [f"{type(error).__name__}: {error}"]
    if isinstance(error, OSError):
        args = [error.errno, error.strerror, error.filename]
    elif kind is type(error):
        args = [str(each) for each in error.args]
    name = kind.__name__ if kind is not None else RuntimeError.__name__
    note = "".join(traceback.format_exception(error)).rstrip()
    return {"error": name, "args": args, "note": note}, (), ()


def rebuild(header: dict[str, Any], name: str) -> Exception:
    """Return the error that `describe` described, as the one who is called `name` raised it."""
    kinds = {kind.__name__: kind for kind in TRAVELLING}
    error = kinds[header["error"]](*header["args"])
    error.add_note(f"raised in {name}:\n{header['note']}")
    return error


class Connection:
    """A connection to the socket `path`, which `name` serves; it belongs to the event loop it was
    made on.

    OSError unless a process of this user listens there.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        self.done: deque[int] = deque()
        """The slabs of answers that are not used any more; the next question says so. Any thread
        may add one."""
        self._spare: int | None = None  # a file for the next large body
        with new_socket(Path(path)) as (connection, address):
            connection.connect(address)
            check_user(connection)
        self._channel: Channel | None = Channel(connection, self._receive, self._lose)

    async def ask(self, message: Message) -> Packet:
        """Return the answer, whose files the caller closes. Raises the error that it carries, or
        ConnectionError if the other end is gone."""
        if self._channel is None:
            raise ConnectionError(self._name)
        header, body = message
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            done = [self.done.popleft() for _ in range(len(self.done))]
            header = header | {"number": number, "done": done}
            self._channel.send(header, body, spare=self._take_spare)
            packet: Packet = await future
        finally:
            self._waiting.pop(number, None)
        if "error" in packet.header:
            raise rebuild(packet.header, self._name)
        return packet

    def keep(self, packet: Packet) -> None:
        """Close the packet, but keep the file that the other end lends for the next large body."""
        if packet.files:
            self._drop_spare()
            self._spare = packet.files.pop()
        packet.close()

    def close(self) -> None:
        """Hang up; questions without an answer raise ConnectionError."""
        if self._channel is not None:
            self._channel.close()
            self._lose()

    def _receive(self, packet: Packet) -> None:
        future = self._waiting.get(packet.header["number"])
        if future is None or future.done():  # who asked has been cancelled
            self.done.extend(number for number, _ in packet.header.get("slabs", ()))
            packet.close()
        else:
            future.set_result(packet)

    def _take_spare(self) -> int:
        file, self._spare = self._spare, None
        return memory_file() if file is None else file

    def _drop_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _lose(self) -> None:
        self._channel = None
        self._drop_spare()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._name))
