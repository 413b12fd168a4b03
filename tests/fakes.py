"""What stands in for a part of a run in several tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamarl.executors.specs import StorageSpec
from llamarl.executors.storage import StorageExecutor
from llamarl.metrics.span import Spans
from llamarl.storage.wire import Written, write_message
from llamarl.types import TOKEN_VERSIONS, Columns, Outcome

Rows = Mapping[int, Mapping[str, np.ndarray]]
"""Row id -> column -> cell."""


class WatchedStorage(StorageExecutor):
    """A real storage unit, without an archive unless in `run_dir`, that remembers what it was
    asked; it needs no start and no close.

    `writes` has the row ids and the names of each write, in vain or not; `num_writes` how often a
    replica has written each row; `outcomes` what became of each row, `versions` which version wrote
    each of its tokens. It holds `cells` from the start. A retire takes `retire_s`.
    """

    def __init__(
        self, run_dir: Path | None = None, *, cells: Rows | None = None, retire_s: float = 0.0
    ) -> None:
        folder = str(run_dir / "archive") if run_dir is not None else None
        spec = StorageSpec(unit=0, archive_folder=folder, archive_tokens=False)
        super().__init__(spec, rank=0, num_ranks=1, spans=Spans("storage", None))
        self.writes: list[tuple[list[int], list[str]]] = []
        self.num_writes: Counter[int] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.versions: dict[int, list[int]] = {}
        self._retire_s = retire_s
        self.put(cells or {})

    def __del__(self) -> None:
        self._slabs.close()

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        self.writes.append((row_ids, sorted(columns)))
        if TOKEN_VERSIONS in columns:
            self.num_writes.update(row_ids)
        await super().write(row_ids, columns, writer)

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        for row_id in row_ids:
            before = self.outcomes.get(row_id, {"outcome": "lost"})["outcome"]
            assert before == "lost", f"row {row_id} retired twice: {before} then {outcome}"
            self.outcomes[row_id] = dict(outcome)
        if self._retire_s:
            await asyncio.sleep(self._retire_s)
        stored = [row_id for rows, _ in self._table.groups(row_ids) for row_id in rows]
        versions = (await self.read(stored, [TOKEN_VERSIONS]))[TOKEN_VERSIONS]
        self.versions |= {i: each.tolist() for i, each in zip(stored, versions, strict=True)}
        await super().retire(row_ids, outcome)

    def count(self, outcome: str) -> int:
        """Rows with this outcome."""
        return sum(found["outcome"] == outcome for found in self.outcomes.values())

    def put(self, rows: Rows) -> None:
        """Hold these cells too; it is not one of the `writes`."""
        for row_id, cells in rows.items():
            columns = {name: [cell] for name, cell in cells.items()}
            header, body = write_message([row_id], columns, "")
            self._write(Written(header, memoryview(b"".join(body))))

    @property
    def rows(self) -> dict[int, dict[str, np.ndarray]]:
        """Copies of what is held."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for row_ids, names in self._table.groups(sorted(self._table._slots)):
            cells, memory = self._slabs.copy(self._table.locate(row_ids, names))
            columns = cells.views([memory])
            for place, row_id in enumerate(row_ids):
                found[row_id] = {name: columns[name][place] for name in names}
        return dict(sorted(found.items()))
