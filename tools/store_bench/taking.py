"""Exclusive taking of rows: the controller's ledger behind a unix socket.

Owns: the socket, who gets which rows. Does not own: arrays. Invariant: each row is given once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from llamarl.experience.graph import GENERATE, SCORE, SETTLE, Graph, Stage
from llamarl.loop.ledger import Ledger
from llamarl.types import Prompt, Request, Sampling

GRAPH = Graph(
    stages={name: Stage(name, None) for name in (SCORE, SETTLE)},
    needs={SCORE: frozenset({GENERATE}), SETTLE: frozenset({SCORE})},
)
SAMPLING = Sampling(max_tokens=1)


class TakeServer:
    """The ledger, in the process that makes this; `start` it in its event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._own = self._ledger = Ledger(GRAPH, pause_s=0.0)
        self._num_left = 0
        self._turn = asyncio.Lock()
        self._prompt = Prompt(prompt_id=0, text="", token_ids=(0,))

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def begin(self, row_ids: range, ledger: Ledger | None = None) -> None:
        """Open these rows; they are given once they are marked, then nothing is. `ledger`: they are
        only marked in it."""
        self._ledger, self._num_left = ledger or self._own, len(row_ids)
        for row_id in row_ids:
            request = Request(row_id=row_id, prompt_ids=(0,), sampling=SAMPLING, seed=0)
            self._ledger.add(request, self._prompt)

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, *arguments = json.loads(line)
            rows = await getattr(self, f"_{method}")(*arguments)
            writer.write(json.dumps(rows).encode() + b"\n")

    async def _mark(self, row_ids: list[int]) -> None:
        self._ledger.finish(GENERATE, row_ids)

    async def _take(self, num_rows: int) -> list[int]:
        rows: list[int] = []
        async with self._turn:  # or two would wait for what the other has
            while len(rows) < num_rows and self._num_left:
                some = await self._ledger.take(SCORE, min(num_rows - len(rows), self._num_left))
                self._num_left -= len(some)
                rows += [row_id for (row_id,) in some]
        self._ledger.forget(rows)
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
