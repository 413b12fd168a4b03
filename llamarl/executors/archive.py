"""The archive: what a run leaves of its rollouts.

Owns: the files, and what a line says. Does not own: the rows, or which rollouts are kept
(`data/kept_rollouts.py`). Invariants: every line is whole, also after a kill. `rollouts-N.jsonl` of
storage unit N has a line for each retired rollout; `kept-N.jsonl` has one for each of those with
a record, with all that is known of it and the same keys in every line. Both are cut to a checkpoint
when a run goes on from it (`checkpoints/positions.py`), so each rollout is in them once.
"""

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from llamarl.dataflow.columns import COLUMNS
from llamarl.episode import OPENING, conversation, version_spans
from llamarl.types import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    PROMPT_ID,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    RECORD,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
    Outcome,
    finish_reason,
)

TOKEN_COLUMNS = (
    *(PROMPT_IDS, RESPONSE_IDS, TOKEN_VERSIONS, GENERATOR_LOGPROBS),
    *(REF_LOGPROBS, TRAINER_LOGPROBS, PROXIMAL_LOGPROBS, LOSS_WEIGHTS, CLIPPED),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A retired rollout: how many entries each of its cells has, and those cells that its lines
    show."""

    lengths: dict[str, int]
    cells: dict[str, np.ndarray]


class Archive:
    """The lines of storage unit `unit`, in `folder`."""

    def __init__(self, folder: Path, unit: int) -> None:
        self._paths = [folder / f"{name}-{unit}.jsonl" for name in ("rollouts", "kept")]
        self._files: list[TextIO] = []

    def open(self) -> None:
        """Lines of an earlier session stay."""
        if not self._files:
            for path in self._paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                _drop_unfinished_line(path)
                self._files.append(path.open("a"))

    def close(self) -> None:
        """May be repeated. OSError if what is still to be written does not fit on the disk."""
        while self._files:
            self._files.pop().close()

    def wants(self, name: str, lengths: np.ndarray, columns: Collection[str]) -> bool:
        """Whether `append` needs the cells of a column, not only their lengths, of rows that have
        these `columns`."""
        if name in TOKEN_COLUMNS and name != TOKEN_VERSIONS:  # of which every line has the runs
            return RECORD in columns
        return name in COLUMNS or bool((lengths == 1).all())

    def append(self, rows: Mapping[int, Row], outcome: Outcome) -> None:
        """Write the lines of each row. OSError if that is not possible."""
        if not self._files:
            raise RuntimeError("a storage unit must be started before it retires rows")
        for path, file, lines in zip(
            self._paths, self._files, _all_lines(rows, outcome), strict=True
        ):
            try:
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
            except OSError as error:
                reason = f"cannot write the archive of rollouts: {error.strerror}"
                raise OSError(error.errno, reason, str(path)) from error


def _all_lines(
    rows: Mapping[int, Row], outcome: Outcome
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of all rows, and of those with a record."""
    lines, kept = [], []
    for row_id, row in rows.items():
        line = _line(row_id, row, outcome)
        lines.append(line)
        if RECORD in row.cells:
            kept.append(_kept_line(line, row.cells))
    return lines, kept


def _line(row_id: int, row: Row, outcome: Outcome) -> dict[str, Any]:
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
    # What a recipe's own stages wrote.
    numbers = {name: _number(cell) for name, cell in cells.items() if name not in COLUMNS}
    if numbers:
        line["numbers"] = numbers
    return line


def _kept_line(line: Mapping[str, Any], cells: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The line of a rollout with a record; None stands for what it has not.

    `version` is the trainer's that used the rollout or the one evaluated. `staleness` is that of
    its oldest token with weight.
    """
    record = json.loads(cells[RECORD].tobytes())
    is_kept = record.pop("is_kept")
    turns = json.loads(cells[TURNS].tobytes()) if TURNS in cells else None
    if turns and turns[0]["role"] == OPENING:
        record["prompt"] = turns.pop(0)["content"]
    versions = [version for version, _ in line["spans"]]
    used = [version for version in versions if version >= line.get("oldest_version", math.inf)]
    names = ("row_id", "outcome", "version", "oldest_version", "reward", "finish")
    sizes = ("num_prompt_tokens", "num_tokens", "spans", "sampling")
    return {
        **{name: line.get(name) for name in names},
        **record,
        "completion": None if turns is None else conversation(turns),
        "turns": turns,
        **{name: line[name] for name in sizes},
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "staleness": line["version"] - min(used) if used else None,
        **{
            name: _numbers(cells[name]) if is_kept and name in cells else None
            for name in TOKEN_COLUMNS
        },
    }


def _drop_unfinished_line(path: Path) -> None:
    """Cut off a line that a killed session did not finish."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _number(cell: np.ndarray) -> float | None:
    """None for what JSON has no word for."""
    return float(cell[0]) if math.isfinite(cell[0]) else None


def _numbers(cell: np.ndarray) -> list[int | float | None]:
    """The entries with as few digits as make each one that of the cell's dtype."""
    if cell.dtype.kind in "iu":
        return cell.tolist()
    return [float(str(entry)) if math.isfinite(entry) else None for entry in cell]
