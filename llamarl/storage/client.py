"""The client of storage, which is one Storage over several storage units."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from llamarl.cluster.sockets import Connection, Packet
from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import ColumnStore, Storage
from llamarl.core.records import EPISODE_ROWS, Columns, Outcome, RolloutInfo
from llamarl.metrics.span import Spans
from llamarl.storage.columns import CompressedColumns, PackedColumns, dtypes_of
from llamarl.storage.wire import Message, ints, read_found, write_message

MESSAGE_BYTES = 8 * 1024 * 1024  # of a call between processes, which are meant for metadata
REASON_LIMIT_S = 2.0  # for calls to say why a unit has ended
PATIENCE_S = 2.0  # without an answer, until a call asks whether the unit is lost


class Unit:
    """The client of one unit, through its `calls` and the `path` of its socket. It can be pickled.

    `is_far`: a slow link leads to the unit, so arrays are compressed to be written. Arrays that are
    read are read-only, and perhaps of the first rows only."""

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
        """Return the named columns of the first of these rows, as many as came in one piece."""
        if not self._is_near():
            return await self._calls.read(row_ids, names)
        question: Message = {"ask": "read", "names": names}, [ints(row_ids)]
        connection, packet = await self._ask(question)
        return read_found(packet, connection.done.append)

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        return await self._calls.find(row_ids)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        await self._calls.retire(row_ids, outcome)

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        await self._calls.erase(row_ids, names)

    async def fence(self, writer: str) -> None:
        """Fence the writer. Its writes that wait at the socket are served later, so refused."""
        await self._calls.fence(writer)

    async def usage(self) -> dict[str, int]:
        return await self._calls.usage()

    def close(self) -> None:
        """Close the connection; arrays that were read stay readable."""
        if self._connection is not None:
            self._connection.close()

    def _is_near(self) -> bool:
        """Return whether the unit can be reached through its socket; that is found out once, and
        again in another event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop and not self._is_elsewhere:
            self._loop = loop
            try:
                self._connection = Connection(self._path, self.name)
            except OSError:  # another host or system, or it has ended, which calls report
                self._is_elsewhere = True
        return not self._is_elsewhere

    async def _ask(self, message: Message) -> tuple[Connection, Packet]:
        """Return the connection and the answer that came by it; an answer that is an error is
        raised. Raises ExecutorLost if the unit ends before."""
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
        """Wait for the answer, or raise ExecutorLost. A socket stays open while its process stands
        still; a call ends once that is noticed."""
        usage = asyncio.ensure_future(self._calls.usage())
        try:
            either: list[asyncio.Future[Any]] = [answer, usage]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if usage.done() and isinstance(error := usage.exception(), ExecutorLost):
                raise error
        finally:
            usage.cancel()


def _pieces(columns: Columns, num_rows: int) -> Iterator[slice]:
    """Yield consecutive rows that have at most MESSAGE_BYTES together, or one row that has more."""
    sizes = [[cell.nbytes for cell in cells] for cells in columns.values()]
    sums = np.cumsum(np.sum(sizes, axis=0)) if sizes else np.zeros(num_rows)
    first, before = 0, 0
    while first < num_rows:
        end = max(first + 1, int(np.searchsorted(sums, before + MESSAGE_BYTES, "right")))
        yield slice(first, end)
        first, before = end, int(sums[end - 1])


T = TypeVar("T")


class Store:
    """Spreads rows over storage units: rollout i lives in unit i mod their number, with all
    conversations of an episode.

    It satisfies `faces.Storage`, and can be pickled if its units can. Writes through it are signed
    by `writer`."""

    def __init__(self, units: Sequence[Storage], writer: str = "") -> None:
        self._units, self.writer = units, writer

    def signed(self, writer: str) -> Store:
        """Return a client of the same units for the processes of one start of an executor."""
        return Store(self._units, writer)

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        """Write whole cells. Raises ValueError if a column does not have one array per row."""
        for name, cells in columns.items():
            if len(cells) != len(row_ids):
                raise ValueError(
                    f"column {name} must have one array per row ({len(row_ids)}), got {len(cells)}"
                )
        calls = []
        for unit, some, places in self._shares(row_ids):
            part = {name: _choose(cells, places) for name, cells in columns.items()}
            calls.append(unit.write(some, part, writer or self.writer))
        await asyncio.gather(*calls)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """Return the named columns of these rows, in order, as read-only arrays. Raises KeyError if
        one was never written."""
        shares = self._shares(row_ids)
        parts = await asyncio.gather(*(_read_all(unit, some, names) for unit, some, _ in shares))
        if len(parts) == 1:
            return parts[0]
        columns: Columns = {name: [np.empty(0)] * len(row_ids) for name in names}
        for (_, _, places), part in zip(shares, parts, strict=True):
            for name in names:
                for place, cell in zip(places, part[name], strict=True):
                    columns[name][place] = cell
        return columns

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        calls = (unit.find(some) for unit, some, _ in self._shares(row_ids))
        return [row for rows in await asyncio.gather(*calls) for row in rows]

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        shares = self._shares(row_ids)
        await asyncio.gather(*(unit.retire(some, outcome) for unit, some, _ in shares))

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        shares = self._shares(row_ids)
        await asyncio.gather(*(unit.erase(some, names) for unit, some, _ in shares))

    async def fence(self, writer: str) -> None:
        """Make every unit skip all further writes of this writer."""
        await asyncio.gather(*(unit.fence(writer) for unit in self._units))

    async def usage(self) -> dict[str, int]:
        """Return sums over all units; `is_full` is the number of full units."""
        usages = await asyncio.gather(*(unit.usage() for unit in self._units))
        return {name: sum(usage[name] for usage in usages) for name in usages[0]}

    def _shares(self, row_ids: list[int]) -> list[tuple[Storage, list[int], Sequence[int]]]:
        """Return (unit, the rows that it holds, their positions in `row_ids`) of each unit that
        holds some."""
        num_units = len(self._units)
        places: dict[int, list[int]] = {}
        for place, row_id in enumerate(row_ids):
            places.setdefault(row_id % EPISODE_ROWS % num_units, []).append(place)
        if len(places) == 1:
            return [(self._units[unit], row_ids, range(len(row_ids))) for unit in places]
        shares = ((self._units[unit], some) for unit, some in places.items())
        return [(unit, _choose(row_ids, some), some) for unit, some in shares]


class RecordingStore:
    """A ColumnStore whose writes and reads are recorded as the marks "put" and "get".

    The marks have the number of `rows` and, in `bytes`, the bytes of each column."""

    def __init__(self, storage: ColumnStore, spans: Spans) -> None:
        self._storage, self._spans = storage, spans

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        start_ns = time.monotonic_ns()
        await self._storage.write(row_ids, columns, writer)
        self._record("put", start_ns, len(row_ids), columns)

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        start_ns = time.monotonic_ns()
        columns = await self._storage.read(row_ids, names)
        self._record("get", start_ns, len(row_ids), columns)
        return columns

    def _record(self, name: str, start_ns: int, num_rows: int, columns: Columns) -> None:
        sizes = {
            column: sum(map(len, cells)) * cells[0].itemsize
            for column, cells in columns.items()
            if cells
        }
        now_ns = time.monotonic_ns()
        self._spans.record(name, start_ns, now_ns, "mark", rows=num_rows, bytes=sizes)


async def _read_all(unit: ColumnStore, row_ids: list[int], names: list[str]) -> Columns:
    """Read all these rows, as a unit gives as many of the first rows as fit into one message."""
    columns = await unit.read(row_ids, names)
    while names and 0 < (num_rows := len(columns[names[0]])) < len(row_ids):
        more = await unit.read(row_ids[num_rows:], names)
        columns = {name: cells + more[name] for name, cells in columns.items()}
    return columns


def _choose(values: list[T], places: Sequence[int]) -> list[T]:
    return values if isinstance(places, range) else [values[place] for place in places]
