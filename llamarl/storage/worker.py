"""A storage unit, which holds the arrays of its share of the rollouts until they are retired.

A cell is written once, except that a partial rollout may be written again. Writes of a fenced
writer are skipped, so an executor that was given up too early does no harm; this holds for memory
too, as a writer fills only files that no row is in, its own or an empty slab that was lent to it,
and a file comes into a row only by a write that is served here. A retired row's memory is freed."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llamarl.cluster.sockets import Answer, LocalServer, Packet
from llamarl.core.faces import Storage, Worker
from llamarl.core.groups import version_spans
from llamarl.core.memory import available_bytes
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    Outcome,
    RolloutInfo,
    finish_reason,
)
from llamarl.metrics.span import Spans
from llamarl.storage.archive import Archive, Row
from llamarl.storage.client import MESSAGE_BYTES
from llamarl.storage.columns import PackedColumns, entries
from llamarl.storage.table import Slabs, Spill, Table
from llamarl.storage.wire import INT, found_message, read_write, write_message


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """The spec of storage unit `unit`. Retired rows go to `archive_folder` (None: nowhere), see
    `storage/archive.py`. Clients on the unit's host connect to `socket` (None: it answers calls
    only). Above `max_bytes` in memory (0: no limit) rows go to files in `spill_folder` (None: they
    stay)."""

    executor: ClassVar[str] = "llamarl.storage.worker:StorageWorker"

    unit: int
    archive_folder: str | None
    socket: str | None = None
    spill_folder: str | None = None
    max_bytes: int = 0


log = logging.getLogger(__name__)

RESERVE_BYTES = 512 * 1024 * 1024  # what must be left of the host's memory


class StorageWorker(Worker, Storage):
    """One storage unit. Clients on its host may ask at its socket, all others through calls."""

    def __init__(self, spec: StorageSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        if num_ranks != 1:
            raise ValueError(f"a storage unit must have one rank, got {num_ranks}")
        self._spec, self._spans = spec, spans
        self._slabs = Slabs()
        self._table = Table(self._slabs)
        self._spill = Spill(self._table, self._slabs, spec.spill_folder, spec.max_bytes)
        self._fenced: set[str] = set()  # writers; one per loss of an executor, so they are few
        self._archive: Archive | None = None
        if spec.archive_folder is not None:
            self._archive = Archive(Path(spec.archive_folder), spec.unit)
        self._server: LocalServer | None = None

    async def start(self) -> None:
        """Open the archive; lines of an earlier session stay. Listen at the socket."""
        if self._archive is not None:
            self._archive.open()
        if self._spec.socket is not None and self._server is None:
            try:
                self._server = LocalServer(Path(self._spec.socket), self._answer)
            except OSError as error:
                log.info("clients call, for there is no socket at %s: %s", self._spec.socket, error)

    async def write(self, row_ids: list[int], columns: Columns, writer: str = "") -> None:
        """Write whole cells, all or none; nothing of a fenced writer.

        Raises RuntimeError if a cell exists and its row is not a partial rollout (finish code
        SEGMENT); ValueError if an array is not 1-D of its column's dtype."""
        with self._spans.span("write_rows", rows=len(row_ids)):
            header, body = write_message(row_ids, columns, writer)
            self._write(header, memoryview(b"".join(body)))
        await self._spill.relieve()

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """Return read-only copies of the named columns, in order. Raises KeyError if a cell was
        never written.

        They are of as many of the first rows as have MESSAGE_BYTES together, and at least of
        one."""
        with self._spans.span("read_rows", rows=len(row_ids)):
            cells = self._table.locate(row_ids, names).up_to(MESSAGE_BYTES)
            found, memory = self._slabs.copy(cells)
            return PackedColumns(found.views([memory]))

    async def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        """Return those of these rows that a generator has written, as it reports them when they
        stop."""
        written = [PROMPT_IDS, TOKEN_VERSIONS, SAMPLING, GENERATOR_LOGPROBS]
        groups = self._table.groups(row_ids)
        found = [i for rows, names in groups if {*written} <= {*names} for i in rows]
        if not found:
            return []
        cells, memory = self._slabs.copy(self._table.locate(found, written))
        columns = cells.views([memory])
        return [
            RolloutInfo(
                row_id=row_id,
                num_prompt_tokens=len(prompt),
                num_tokens=len(versions),
                spans=version_spans(versions),
                finish_reason=finish_reason(sampling),
                logprob=float(logprobs.sum(dtype=np.float64)),
            )
            for row_id, prompt, versions, sampling, logprobs in zip(
                found, *(columns[name] for name in written), strict=True
            )
        ]

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows, and those of further conversations of their episodes, with `outcome`
        (its key "outcome" says what became of them), and free them.

        Rows that hold nothing, never written or retired before, leave no line. Raises OSError if
        the archive cannot be written."""
        self._retire(row_ids, outcome)

    async def erase(self, row_ids: list[int], names: list[str]) -> None:
        """Free these cells, if there are any."""
        self._table.erase(row_ids, names)

    async def fence(self, writer: str) -> None:
        """Skip all further writes of this writer."""
        if not writer:
            raise ValueError("writer must have a name to be fenced, got none")
        self._fenced.add(writer)

    async def usage(self) -> dict[str, int]:
        """Return how many rows and bytes the unit holds: `num_rows`, `memory_bytes`,
        `spilled_bytes`; and `is_full`, 1 if it should take no more, because memory cannot be
        spilled to disk."""
        self._spill.is_short = available_bytes() < RESERVE_BYTES
        await self._spill.relieve()
        return {
            "num_rows": len(self._table),
            "memory_bytes": self._slabs.memory_bytes,
            "spilled_bytes": self._slabs.spilled_bytes,
            "is_full": int(self._spill.is_over),
        }

    async def close(self) -> None:
        """Close the archive and the socket, and give all memory back, also if the archive's disk is
        full, which raises OSError."""
        if self._server is not None:
            self._server.close()
        try:
            if self._archive is not None:
                self._archive.close()
        finally:
            await self._spill.close()
            self._slabs.close()

    def _answer(self, packet: Packet) -> Answer | Awaitable[Answer]:
        """Answer a client on this host."""
        ask = packet.header["ask"]
        self._slabs.read_done(packet.header["done"])
        if ask == "write":
            with self._spans.span("write_rows", rows=packet.header["rows"]):
                self._write(packet.header, packet.open_body(), packet.body_file)
            if self._spill.is_over:
                return asyncio.shield(self._relieved())
            lent = self._slabs.lend(packet.body_file[1]) if packet.body_file else []
            for file in lent:  # once the answer is on its way
                asyncio.get_running_loop().call_soon(os.close, file)
            return {}, (), lent
        row_ids: list[int] = np.frombuffer(packet.open_body(), INT).tolist()
        with self._spans.span("read_rows", rows=len(row_ids)):
            cells = self._table.locate(row_ids, packet.header["names"])
            return found_message(cells, self._slabs)

    def _write(
        self, header: dict[str, Any], body: memoryview, file: tuple[int, int] | None = None
    ) -> None:
        """Store a write as it arrived; `file` is (descriptor, bytes) if its body lies in a file,
        which becomes a slab as it is."""
        row_ids, cells = read_write(header, body)
        if header["writer"] in self._fenced:
            log.info("skipped %d rows of %s, which was lost", len(row_ids), header["writer"])
            return
        self._table.check(row_ids, cells.dtypes)
        codes = None  # the last entries of SAMPLING
        if SAMPLING in cells.dtypes:
            place, dtype = [*cells.dtypes].index(SAMPLING), cells.dtypes[SAMPLING]
            ends = (cells.starts + cells.sizes)[place] // dtype.itemsize
            codes = entries(body, dtype)[ends - 1]
        before = INT.itemsize * len(row_ids) * (1 + len(cells.dtypes))  # row ids and lengths
        if file is None or not self._slabs.may_adopt or 2 * before > len(body):
            slab, start = self._slabs.append([body[before:]])
            cells = replace(cells, starts=cells.starts + (start - before))
        else:
            slab = self._slabs.adopt(file[0])
        self._table.add(row_ids, slab, cells, codes)

    async def _relieved(self) -> Answer:
        await self._spill.relieve()
        return {}, (), ()

    def _rows(self, archive: Archive, row_ids: Sequence[int]) -> dict[int, Row]:
        """Return the cells that the archive needs of these rows."""
        found = {}
        for rows, names in self._table.groups(row_ids):
            all_cells = self._table.locate(rows, names)
            lengths = all_cells.lengths.T.tolist()
            by_name = zip(names, all_cells.lengths, strict=True)
            wanted = [name for name, each in by_name if archive.wants(name, each, names)]
            cells, memory = self._slabs.copy(self._table.locate(rows, wanted))
            columns = cells.views([memory])
            for place, row_id in enumerate(rows):
                row_cells = {name: columns[name][place] for name in wanted}
                found[row_id] = Row(dict(zip(names, lengths[place], strict=True)), row_cells)
        return {row_id: found[row_id] for row_id in row_ids if row_id in found}

    def _retire(self, row_ids: list[int], outcome: Outcome) -> None:
        if "outcome" not in outcome:
            raise ValueError(f'an outcome must have the key "outcome", got {sorted(outcome)}')
        rows = self._table.with_conversations(row_ids)
        with self._spans.span("retire_rows", rows=len(rows)):
            if self._archive is not None:
                self._archive.append(self._rows(self._archive, rows), outcome)
            self._table.retire(rows)
