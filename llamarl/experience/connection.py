"""A client's connection to a socket on its own host: it asks, and gets the answer to each question.

Owns: which answer belongs to which question. Does not own: packets (`channel.py`), what is asked.
Invariant: every question ends, with its answer, with the error that it is, or with ConnectionError
once the other end is gone.
"""

import asyncio
import itertools
import socket
from pathlib import Path

from llamarl.experience.channel import Channel, Packet
from llamarl.experience.server import rebuild, short_path
from llamarl.experience.wire import Message


class Connection:
    """To the socket `path`, which `name` serves; it belongs to the event loop it was made on.

    OSError unless somebody listens there.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short_path(Path(path)) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        self._channel: Channel | None = Channel(connection, self._receive, self._lose)

    async def ask(self, message: Message) -> Packet:
        """The answer, whose files the caller closes. Raises the error that it is, ConnectionError
        if the other end is gone."""
        if self._channel is None:
            raise ConnectionError(self._name)
        header, body = message
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._channel.send(header | {"number": number}, body)
            packet: Packet = await future
        finally:
            self._waiting.pop(number, None)
        if "error" in packet.header:
            raise rebuild(packet.header, self._name)
        return packet

    def close(self) -> None:
        """Hang up; questions without an answer raise ConnectionError."""
        if self._channel is not None:
            self._channel.close()
            self._lose()

    def _receive(self, packet: Packet) -> None:
        future = self._waiting.get(packet.header["number"])
        if future is None or future.done():  # who asked has been cancelled
            packet.close()
        else:
            future.set_result(packet)

    def _lose(self) -> None:
        self._channel = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._name))
