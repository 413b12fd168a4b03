"""Exclusive taking of rows: the controller's batcher behind a unix socket."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from llamarl.core.batcher import Batcher


class ReadyRows:
    """Rows that are written and given to no consumer yet, as the controller gathers them."""

    def __init__(self) -> None:
        self._batcher = Batcher(self._add, _fail)
        self._rows: deque[int] = deque()
        self._has_rows = asyncio.Event()

    def mark(self, row_ids: list[int]) -> None:
        """These rows are written."""
        for row_id in row_ids:
            self._batcher.ask(row_id)

    async def take(self, most: int) -> list[int]:
        """Rows that no other call gets, at most so many; waits for at least one."""
        while not self._rows:
            self._has_rows.clear()
            await self._has_rows.wait()
        return [self._rows.popleft() for _ in range(min(most, len(self._rows)))]

    async def _add(self, row_ids: list[int]) -> None:
        self._rows.extend(row_ids)
        self._has_rows.set()


def _fail(error: Exception) -> None:
    raise error


class TakeServer:
    """In the process that makes this; `start` it in its event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready = ReadyRows()
        self._num_left = 0
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def begin(self, row_ids: range) -> None:
        """Give so many rows once they are marked, then nothing."""
        self._num_left = len(row_ids)

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, *arguments = json.loads(line)
            rows = await getattr(self, f"_{method}")(*arguments)
            writer.write(json.dumps(rows).encode() + b"\n")

    async def _mark(self, row_ids: list[int]) -> None:
        self._ready.mark(row_ids)

    async def _take(self, num_rows: int) -> list[int]:
        rows: list[int] = []
        async with self._turn:  # or two would wait for what the other has
            while len(rows) < num_rows and self._num_left:
                some = await self._ready.take(min(num_rows - len(rows), self._num_left))
                self._num_left -= len(some)
                rows += some
        return rows


class TakeClient:
    """A connection to the server; one call at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def mark(self, row_ids: list[int]) -> None:
        """These rows are written."""
        await self._call("mark", row_ids)

    async def take(self, num_rows: int) -> list[int]:
        """So many rows, which no other consumer gets; fewer at the end, none after it."""
        rows: list[int] = await self._call("take", num_rows)
        return rows

    async def _call(self, *message: Any) -> Any:
        async with self._turn:
            if self._streams is None:
                self._streams = await asyncio.open_unix_connection(self._path, limit=2**24)
            reader, writer = self._streams
            writer.write(json.dumps(message).encode() + b"\n")
            return json.loads(await reader.readline())
