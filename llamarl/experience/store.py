"""The client of storage: one Storage over several storage units.

Owns: which unit holds a row, and the form in which columns travel. Does not own: arrays, which
are in the units. Invariant: rows come back in the order they were asked for, and the bytes of a
message are those of its arrays plus a few per row: no padding, no pickled object per row.
"""

import asyncio
from typing import Any

import numpy as np

from llamarl.protocols import Storage
from llamarl.types import Columns, Outcome

Message = dict[str, tuple[np.ndarray, np.ndarray]]
"""Column name -> (the rows' values one after the other, the rows' lengths)."""


def encode(columns: Columns) -> Message:
    """Join the rows of each column. ValueError if a cell is not 1-D or a column mixes dtypes."""
    message: Message = {}
    for name, cells in columns.items():
        kinds = {(cell.ndim, cell.dtype.str) for cell in cells}
        if len(kinds) > 1 or any(ndim != 1 for ndim, _ in kinds):
            raise ValueError(f"column {name} must hold 1-D arrays of one dtype, got {kinds}")
        values = np.concatenate(cells) if cells else np.empty(0)
        message[name] = values, np.array([len(cell) for cell in cells], dtype=np.int32)
    return message


def decode(message: Message) -> Columns:
    """Undo `encode`. The cells are views into one array per column."""
    return {
        name: np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
        for name, (values, lengths) in message.items()
    }


class PackedColumns(dict[str, list[np.ndarray]]):
    """Columns that are pickled in their compact form and arrive as a plain dict."""

    def __reduce__(self) -> Any:
        return decode, (encode(self),)


class Store:
    """Spreads rows over storage units: row i lives in unit i mod their number.

    Satisfies `protocols.Storage`, and travels to executors if its units do.
    """

    def __init__(self, units: list[Storage]) -> None:
        self._units = units

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        """Write whole cells. ValueError if a column does not have one array per row."""
        for name, cells in columns.items():
            if len(cells) != len(row_ids):
                raise ValueError(
                    f"column {name} must have one array per row ({len(row_ids)}), got {len(cells)}"
                )
        await asyncio.gather(
            *(
                self._units[unit].write(
                    [row_ids[place] for place in places],
                    PackedColumns(
                        {n: [cells[place] for place in places] for n, cells in columns.items()}
                    ),
                    None if attempts is None else [attempts[place] for place in places],
                )
                for unit, places in self._places(row_ids).items()
            )
        )

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """The named columns of these rows, in order. KeyError if a cell was never written."""
        shares = self._places(row_ids)
        parts = await asyncio.gather(
            *(
                self._units[unit].read([row_ids[place] for place in places], names)
                for unit, places in shares.items()
            )
        )
        columns: Columns = {name: [np.empty(0)] * len(row_ids) for name in names}
        for places, part in zip(shares.values(), parts, strict=True):
            for name in names:
                for place, cell in zip(places, part[name], strict=True):
                    columns[name][place] = cell
        return columns

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows with their outcome and free them."""
        await asyncio.gather(
            *(
                self._units[unit].retire([row_ids[place] for place in places], outcome)
                for unit, places in self._places(row_ids).items()
            )
        )

    def _places(self, row_ids: list[int]) -> dict[int, list[int]]:
        """Unit -> positions in `row_ids` of the rows it holds."""
        places: dict[int, list[int]] = {}
        for place, row_id in enumerate(row_ids):
            places.setdefault(row_id % len(self._units), []).append(place)
        return places
