"""A client's connection to a socket on its own host: it asks, and gets the answer to each question.

Owns: which answer belongs to which question. Does not own: packets (`channel.py`), what is asked.
Invariant: every question ends, with its answer, with the error that it is, or with ConnectionError
once the other end is gone.
"""

import asyncio
import itertools
import os
from collections import deque
from pathlib import Path

from llamarl.memory_file import memory_file
from llamarl.storage.channel import Channel, Packet, check_user, new_socket
from llamarl.storage.server import rebuild
from llamarl.storage.wire import Message


class Connection:
    """To the socket `path`, which `name` serves; it belongs to the event loop it was made on.

    OSError unless a process of this user listens there.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        self.done: deque[int] = deque()
        """Slabs of answers that are not used any more; the next question says so. Any thread may
        add one."""
        self._spare: int | None = None  # a file for the next large body
        with new_socket(Path(path)) as (connection, address):
            connection.connect(address)
            check_user(connection)
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
