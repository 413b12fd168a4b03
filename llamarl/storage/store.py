"""The client of storage: one Storage over several storage units.

Owns: which unit holds a row. Does not own: arrays, which are in the units, or the way to a unit
(`unit.py`). Invariant: rows come back in the order they were asked for.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from llamarl.metrics.span import Spans
from llamarl.protocols import ColumnStore, Storage
from llamarl.types import Columns, Outcome, RolloutInfo

T = TypeVar("T")


class Store:
    """Spreads rows over storage units: row i lives in unit i mod their number.

    Satisfies `protocols.Storage`, and travels to executors if its units do. What goes through it is
    signed by `writer`.
    """

    def __init__(self, units: Sequence[Storage], writer: str = "") -> None:
        self._units, self.writer = units, writer

    def signed(self, writer: str) -> "Store":
        """A client of the same units for the processes of one start of an executor."""
        return Store(self._units, writer)

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        """Write whole cells. ValueError if a column does not have one array per row."""
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
        """The named columns of these rows, in order, as read-only arrays. KeyError if one was
        never written."""
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
        """Let every unit take nothing more from this writer."""
        await asyncio.gather(*(unit.fence(writer) for unit in self._units))

    async def usage(self) -> dict[str, int]:
        """Sums over all units; `is_full` is the number of units that are."""
        usages = await asyncio.gather(*(unit.usage() for unit in self._units))
        return {name: sum(usage[name] for usage in usages) for name in usages[0]}

    def _shares(self, row_ids: list[int]) -> list[tuple[Storage, list[int], Sequence[int]]]:
        """(unit, those of the rows that it holds, their positions in `row_ids`)."""
        num_units = len(self._units)
        places: dict[int, list[int]] = {}
        for place, row_id in enumerate(row_ids):
            places.setdefault(row_id % num_units, []).append(place)
        if len(places) == 1:
            return [(self._units[unit], row_ids, range(len(row_ids))) for unit in places]
        shares = ((self._units[unit], some) for unit, some in places.items())
        return [(unit, _choose(row_ids, some), some) for unit, some in shares]


class RecordingStore:
    """Any ColumnStore; what goes through it is recorded as the marks "put" and "get".

    They have the number of `rows` and, in `bytes`, those of each column.
    """

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
    """A unit gives as many of the first rows as fit into one message."""
    columns = await unit.read(row_ids, names)
    while names and 0 < (num_rows := len(columns[names[0]])) < len(row_ids):
        more = await unit.read(row_ids[num_rows:], names)
        columns = {name: cells + more[name] for name, cells in columns.items()}
    return columns


def _choose(values: list[T], places: Sequence[int]) -> list[T]:
    return values if isinstance(places, range) else [values[place] for place in places]
