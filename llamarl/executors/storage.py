"""A storage unit: holds the arrays of its share of the rollouts until they are retired.

Owns: the arrays, and one archive line per retired rollout. Does not own: which rows exist or who
may take them (the ledger). Invariant: a cell is written once, except that a partial rollout may be
written again; what an earlier attempt still writes of a rollout that was lost is skipped, so a
replica that was given up too early does no harm; a retired row's memory is freed.
"""

import json
import logging
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from llamarl.executors.specs import StorageSpec
from llamarl.experience.store import PackedColumns
from llamarl.metrics.span import Spans
from llamarl.types import (
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
    Outcome,
    finish_reason,
    version_spans,
)

log = logging.getLogger(__name__)

DTYPES = {
    PROMPT_IDS: np.dtype(np.int32),
    RESPONSE_IDS: np.dtype(np.int32),
    GENERATOR_LOGPROBS: np.dtype(np.float32),
    TOKEN_VERSIONS: np.dtype(np.int32),
    SAMPLING: np.dtype(np.float64),
    REWARD: np.dtype(np.float64),
    REF_LOGPROBS: np.dtype(np.float32),
    TRAINER_LOGPROBS: np.dtype(np.float32),
}
TOKEN_COLUMNS = (PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, REF_LOGPROBS, TRAINER_LOGPROBS)

Cells = dict[str, np.ndarray]


class StorageExecutor:
    """One storage unit."""

    def __init__(self, spec: StorageSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        if num_ranks != 1:
            raise ValueError(f"a storage unit must have one rank, got {num_ranks}")
        self._spans = spans
        self._archive_tokens = spec.archive_tokens
        self._rows: dict[int, Cells] = {}
        self._attempts: Counter[int] = Counter()  # of rows that were lost, and how often
        self._path: Path | None = None
        if spec.archive_folder is not None:
            self._path = Path(spec.archive_folder, f"rollouts-{spec.unit}.jsonl")
        self._archive: TextIO | None = None

    async def start(self) -> None:
        """Open the archive; lines of an earlier session stay."""
        if self._path is not None and self._archive is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_unfinished_line(self._path)
            self._archive = self._path.open("a")

    async def write(
        self, row_ids: list[int], columns: Columns, attempts: list[int] | None = None
    ) -> None:
        """Write whole cells, all or none, but skip rows lost since their attempt began.

        RuntimeError if a cell exists and its row is not a partial rollout (finish code SEGMENT);
        ValueError if an array is not 1-D of its column's dtype.
        """
        with self._spans.span("write_rows", rows=len(row_ids)):
            stale: set[int] = set()
            if attempts is not None:
                pairs = zip(row_ids, attempts, strict=True)
                stale = {row_id for row_id, attempt in pairs if attempt < self._attempts[row_id]}
            if stale:
                log.info("skipped %d rows, which were started again elsewhere", len(stale))
            self._check(row_ids, columns, stale)
            for position, row_id in enumerate(row_ids):
                if row_id in stale:
                    continue
                row = self._rows.setdefault(row_id, {})
                for name, cells in columns.items():
                    # A copy of its own, for views would keep the whole message alive.
                    row[name] = np.array(cells[position])

    async def read(self, row_ids: list[int], names: list[str]) -> Columns:
        """Copies of the named columns, in order. KeyError if a cell was never written."""
        with self._spans.span("read_rows", rows=len(row_ids)):
            return PackedColumns(
                {name: [self._cell(i, name).copy() for i in row_ids] for name in names}
            )

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        """Archive these rows with `outcome` (its key "outcome" says what became of them), free
        them.

        Rows that hold nothing, never written or retired before, leave no line. Of rows that are
        lost the next attempt begins. OSError if the archive cannot be written.
        """
        if "outcome" not in outcome:
            raise ValueError(f'an outcome must have the key "outcome", got {sorted(outcome)}')
        with self._spans.span("retire_rows", rows=len(row_ids)):
            retired = {row_id: self._rows[row_id] for row_id in row_ids if row_id in self._rows}
            if self._path is not None:
                lines = [self._line(row_id, row, outcome) for row_id, row in retired.items()]
                self._append(self._path, lines)
            for row_id in retired:
                del self._rows[row_id]
            if outcome["outcome"] == "lost":
                self._attempts.update(row_ids)

    async def close(self) -> None:
        """Close the archive."""
        if self._archive is not None:
            self._archive.close()
            self._archive = None

    def _check(self, row_ids: list[int], columns: Columns, stale: set[int]) -> None:
        if len(set(row_ids)) != len(row_ids):
            raise ValueError(f"row ids of one write must differ, got {row_ids}")
        for name, cells in columns.items():
            dtype = DTYPES.get(name)
            for row_id, cell in zip(row_ids, cells, strict=True):
                if cell.ndim != 1 or cell.dtype != (dtype or cell.dtype):
                    raise ValueError(
                        f"column {name} must be 1-D {dtype}, got {cell.dtype} {cell.shape}"
                    )
                row = self._rows.get(row_id, {})
                if name in row and row_id not in stale and not _is_partial(row):
                    raise RuntimeError(f"row {row_id} already has column {name} and is not partial")

    def _cell(self, row_id: int, name: str) -> np.ndarray:
        row = self._rows.get(row_id)
        if row is None:
            raise KeyError(f"row {row_id} is not stored (column {name} was asked for)")
        if name not in row:
            raise KeyError(f"row {row_id} has no column {name}, only {sorted(row)}")
        return row[name]

    def _line(self, row_id: int, row: Cells, outcome: Outcome) -> str:
        empty = np.empty(0)
        spans = version_spans(row.get(TOKEN_VERSIONS, empty))
        line: dict[str, Any] = {
            "row_id": row_id,
            **outcome,
            "num_prompt_tokens": len(row.get(PROMPT_IDS, empty)),
            "num_tokens": len(row.get(RESPONSE_IDS, empty)),
            "spans": [[span.version, span.num_tokens] for span in spans],
            "finish": None,
            "reward": None,
            "sampling": None,
        }
        if REWARD in row and math.isfinite(row[REWARD][0]):
            line["reward"] = float(row[REWARD][0])
        if SAMPLING in row:
            temperature, top_k, top_p, max_tokens, seed, _ = row[SAMPLING].tolist()
            line["finish"] = str(finish_reason(row[SAMPLING]))
            line["sampling"] = {
                "temperature": temperature,
                "top_k": int(top_k),
                "top_p": top_p,
                "max_tokens": int(max_tokens),
                "seed": int(seed),
            }
        if self._archive_tokens:
            line.update({name: row[name].tolist() for name in TOKEN_COLUMNS if name in row})
        return json.dumps(line) + "\n"

    def _append(self, path: Path, lines: list[str]) -> None:
        if self._archive is None:
            raise RuntimeError("a storage unit must be started before it retires rows")
        try:
            self._archive.write("".join(lines))
            self._archive.flush()
        except OSError as error:
            reason = f"cannot write the archive of rollouts: {error.strerror}"
            raise OSError(error.errno, reason, str(path)) from error


def _drop_unfinished_line(path: Path) -> None:
    """Cut off a line that a killed session did not finish."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _is_partial(row: Cells) -> bool:
    return SAMPLING in row and finish_reason(row[SAMPLING]) is FinishReason.SEGMENT
