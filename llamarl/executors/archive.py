"""The archive: one line per retired rollout.

Owns: the file, and what a line says. Does not own: the rows. Invariant: every line is whole, also
after a kill.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from llamarl.dataflow.columns import COLUMNS
from llamarl.types import (
    COMPLETION_TEXT,
    GENERATOR_LOGPROBS,
    PROMPT_ID,
    PROMPT_IDS,
    PROMPT_TEXT,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Outcome,
    finish_reason,
    version_spans,
)

TOKEN_COLUMNS = (
    *(PROMPT_IDS, RESPONSE_IDS, TOKEN_VERSIONS, GENERATOR_LOGPROBS),
    *(REF_LOGPROBS, TRAINER_LOGPROBS),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A retired rollout: how many entries each of its cells has, and those cells that a line
    shows."""

    lengths: dict[str, int]
    cells: dict[str, np.ndarray]


class Archive:
    """The lines of one storage unit, in `path`; with token ids and log-probs if `has_tokens`."""

    def __init__(self, path: Path, has_tokens: bool) -> None:
        self._path, self._has_tokens = path, has_tokens
        self._file: TextIO | None = None

    def open(self) -> None:
        """Lines of an earlier session stay."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_unfinished_line(self._path)
            self._file = self._path.open("a")

    def close(self) -> None:
        """May be repeated. OSError if what is still to be written does not fit on the disk."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def wants(self, name: str, lengths: np.ndarray) -> bool:
        """Whether `append` needs the cells of a column, not only their lengths."""
        if name in TOKEN_COLUMNS and name != TOKEN_VERSIONS:  # of which every line has the runs
            return self._has_tokens
        return name in COLUMNS or bool((lengths == 1).all())

    def append(self, rows: Mapping[int, Row], outcome: Outcome) -> None:
        """Write a line per row. OSError if that is not possible."""
        if self._file is None:
            raise RuntimeError("a storage unit must be started before it retires rows")
        try:
            for row_id, row in rows.items():
                self._file.write(json.dumps(self._line(row_id, row, outcome)) + "\n")
            self._file.flush()
        except OSError as error:
            reason = f"cannot write the archive of rollouts: {error.strerror}"
            raise OSError(error.errno, reason, str(self._path)) from error

    def _line(self, row_id: int, row: Row, outcome: Outcome) -> dict[str, Any]:
        cells = row.cells
        spans = version_spans(cells.get(TOKEN_VERSIONS, np.empty(0)))
        line: dict[str, Any] = {
            "row_id": row_id,
            **outcome,
            "prompt_id": int(cells[PROMPT_ID][0]) if PROMPT_ID in cells else None,
            "num_prompt_tokens": row.lengths.get(PROMPT_IDS, 0),
            "num_tokens": row.lengths.get(RESPONSE_IDS, 0),
            "spans": [[span.version, span.num_tokens] for span in spans],
            "finish": None,
            "reward": _number(cells[REWARD]) if REWARD in cells else None,
            "sampling": None,
        }
        if SAMPLING in cells:
            temperature, top_k, top_p, max_tokens, seed, _ = cells[SAMPLING].tolist()
            line["finish"] = str(finish_reason(cells[SAMPLING]))
            line["sampling"] = {
                "temperature": temperature,
                "top_k": int(top_k),
                "top_p": top_p,
                "max_tokens": int(max_tokens),
                "seed": int(seed),
            }
        if COMPLETION_TEXT in cells:
            line["prompt"] = cells[PROMPT_TEXT].tobytes().decode()
            line["completion"] = cells[COMPLETION_TEXT].tobytes().decode()
        # What a recipe's own stages wrote.
        numbers = {name: _number(cell) for name, cell in cells.items() if name not in COLUMNS}
        if numbers:
            line["numbers"] = numbers
        if self._has_tokens:
            line |= {name: cells[name].tolist() for name in TOKEN_COLUMNS if name in cells}
        return line


def _drop_unfinished_line(path: Path) -> None:
    """Cut off a line that a killed session did not finish."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _number(cell: np.ndarray) -> float | None:
    """None for what JSON has no word for."""
    return float(cell[0]) if math.isfinite(cell[0]) else None
