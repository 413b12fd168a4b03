"""The socket at which a process answers clients of its user on its own host.

Owns: the socket's file and folder, who may connect, and how an error travels. Does not own: what is
asked and who answers: storage units and external stages (`executors/`), a run (`run/control.py`).
Each of them listens in its own process, so the leases of an external stage do not pass through the
controller. Invariant: only this user's processes get an answer, what a client had not sent whole
when it died has no effect, and the answer to one that is gone is not waited for.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.errors import NotStored
from llamarl.memory_file import Buffer
from llamarl.storage.channel import Channel, Packet, check_user, new_socket

Answer = tuple[dict[str, Any], Sequence[Buffer], Sequence[int]]  # header, body, files
TRAVELLING: tuple[type[Exception], ...] = (NotStored, KeyError, ValueError, RuntimeError, OSError)


class LocalServer:
    """Listens at `path`; `answer` gets every packet, and raises what the client is to raise.

    `gone` is called when a client hangs up or dies. An answer that it still waits for is cancelled:
    `answer` shields what must end all the same.
    """

    def __init__(
        self,
        path: Path,
        answer: Callable[[Packet], Awaitable[Answer] | Answer],
        gone: Callable[[Channel], None] = lambda channel: None,
    ) -> None:
        """OSError if the folder's file system has no sockets."""
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
    """The error as an answer; one that a client cannot know becomes a RuntimeError."""
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
    """The error that `describe` described, as the one who is called `name` raised it."""
    kinds = {kind.__name__: kind for kind in TRAVELLING}
    error = kinds[header["error"]](*header["args"])
    error.add_note(f"raised in {name}:\n{header['note']}")
    return error
