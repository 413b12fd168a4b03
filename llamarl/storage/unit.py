"""The client of one storage unit.

Owns: the way to the unit: its socket if it is on this host, else calls between processes. Does not
own: what a unit does, which unit holds a row (`store.py`). Invariant: both ways give the same
results and errors.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from llamarl.errors import ExecutorLost
from llamarl.protocols import Storage
from llamarl.storage.cells import dtypes_of
from llamarl.storage.channel import Packet
from llamarl.storage.connection import Connection
from llamarl.storage.packed_columns import CompressedColumns, PackedColumns
from llamarl.storage.wire import Message, ints, read_found, write_message
from llamarl.types import Columns, Outcome, RolloutInfo

MESSAGE_BYTES = 8 * 1024 * 1024  # of a call between processes, which are meant for metadata
REASON_LIMIT_S = 2.0  # for calls to say why a unit has ended
PATIENCE_S = 2.0  # without an answer, until a call asks whether the unit is lost


class Unit:
    """protocols.Storage of one unit: its `calls`, and the `path` of its socket. Picklable.

    `is_far`: a slow link leads to the unit, so what is written is compressed. What is read is
    read-only, and perhaps only the first rows.
    """

    def __init__(self, name: str, calls: Storage, path: str, *, is_far: bool = False) -> None:
        self.name, self._is_far = name, is_far
        self._calls, self._path = calls, path
        self._connection: Connection | None = None
        self._is_elsewhere = is_far
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> Any:
        return partial(Unit, is_far=self._is_far), (self.name, self._calls, self._path)

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        if self._is_near():
            connection, packet = await self._ask(write_message(row_ids, columns, writer))
            connection.keep(packet)
        else:
            dtypes_of(columns)  # before anything is sent
            for rows in _pieces(columns, len(row_ids)):
                some = {name: cells[rows] for name, cells in columns.items()}
                if self._is_far:
                    some = await asyncio.to_thread(CompressedColumns, some)
                else:
                    some = PackedColumns(some)
                await self._calls.write(row_ids[rows], some, writer)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """The named columns of the first of these rows, as many as came in one piece."""
        if not self._is_near():
            return await self._calls.read(row_ids, names)
        question: Message = {"ask": "read", "names": names}, [ints(row_ids)]
        connection, packet = await self._ask(question)
        return read_found(packet, connection.done.append)

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        return await self._calls.find(row_ids)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        if self._is_near():
            message: Message = {"ask": "retire", "outcome": outcome}, [ints(row_ids)]
            (await self._ask(message))[1].close()
        else:
            await self._calls.retire(row_ids, outcome)

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        await self._calls.erase(row_ids, names)

    async def fence(self, writer: str) -> None:
        """Writes that wait at the socket are served later, so refused."""
        await self._calls.fence(writer)

    async def usage(self) -> dict[str, int]:
        if not self._is_near():
            return await self._calls.usage()
        _, packet = await self._ask(({"ask": "usage"}, []))
        packet.close()
        usage: dict[str, int] = packet.header["usage"]
        return usage

    def close(self) -> None:
        """Hang up; what was read stays readable."""
        if self._connection is not None:
            self._connection.close()

    def _is_near(self) -> bool:
        """Whether the unit can be reached through its socket; that is found out once, and again in
        another event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop and not self._is_elsewhere:
            self._loop = loop
            try:
                self._connection = Connection(self._path, self.name)
            except OSError:  # another host or system, or it has ended, which calls report
                self._is_elsewhere = True
        return not self._is_elsewhere

    async def _ask(self, message: Message) -> tuple[Connection, Packet]:
        """The answer and how it came; raises the error that it is. ExecutorLost if the unit ends
        before."""
        connection = self._connection
        assert connection is not None
        answer = asyncio.ensure_future(connection.ask(message))
        try:
            while not (await asyncio.wait({answer}, timeout=PATIENCE_S))[0]:
                await self._raise_if_lost(answer)
            return connection, answer.result()
        except ConnectionError:
            with suppress(TimeoutError):  # a process that has ended may not be missed at once
                async with asyncio.timeout(REASON_LIMIT_S):
                    await self._calls.usage()
            raise ExecutorLost(self.name, None, "it hung up during a call") from None
        finally:
            answer.cancel()

    async def _raise_if_lost(self, answer: asyncio.Future[Packet]) -> None:
        """A socket stays open while its process stands still; a call ends once that is noticed."""
        usage = asyncio.ensure_future(self._calls.usage())
        try:
            either: list[asyncio.Future[Any]] = [answer, usage]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if usage.done() and isinstance(error := usage.exception(), ExecutorLost):
                raise error
        finally:
            usage.cancel()


def _pieces(columns: Columns, num_rows: int) -> Iterator[slice]:
    """Consecutive rows that have at most MESSAGE_BYTES together, or one row that has more."""
    sizes = [[cell.nbytes for cell in cells] for cells in columns.values()]
    sums = np.cumsum(np.sum(sizes, axis=0)) if sizes else np.zeros(num_rows)
    first, before = 0, 0
    while first < num_rows:
        end = max(first + 1, int(np.searchsorted(sums, before + MESSAGE_BYTES, "right")))
        yield slice(first, end)
        first, before = end, int(sums[end - 1])
