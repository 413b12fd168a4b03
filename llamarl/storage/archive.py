"""The archive: the lines that a run leaves of its rollouts, some of which it keeps whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np

from llamarl.core.groups import OPENING, Group, conversation, version_spans
from llamarl.core.records import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    LOSS_WEIGHTS,
    PROMPT_ID,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    RECORD,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    ROUTED_EXPERTS,
    SAMPLING,
    TASK,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
    Outcome,
    Prompt,
    StageStatus,
    episode_of,
    finish_reason,
)
from llamarl.storage.columns import COLUMNS


def is_kept(prompt: Prompt, share: float, seed: int) -> bool:
    """Return whether the rollouts of `prompt` in its epoch are among the `share` that is kept
    whole. Prompts kept at one share are kept at every larger one."""
    words = f"{seed} {prompt.epoch} {prompt.prompt_id} {prompt.is_held_out}"
    digest = hashlib.sha256(words.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def make_record(
    group: Group,
    row_id: int,
    outcome: Outcome,
    *,
    prompts: Sequence[str] = (),
    held_out: Mapping[str, str] = MappingProxyType({}),
    functions: Sequence[str] = (),
    prompt_field: str = "",
) -> dict[str, Any]:
    """Return the archive's record of a rollout beside its arrays: its prompt, from the sources
    `prompts` or the file of its set in `held_out`, with its question in `prompt_field`, and its
    outcome. `rewards` has the result of each of the reward `functions`, None without one. What the
    episode of a task needs is left out.

    `row_id` may be that of a further conversation of an episode: score and numbers are the
    episode's, the advantage is its own. `step` is the step that trained it, or should have; for an
    evaluation, the version."""
    own_advantage, row_id = group.own_advantages.get(row_id), episode_of(row_id)[0]
    prompt, score = group.prompt, group.scores.get(row_id)
    parts, extra = ({}, {}) if score is None else (score.parts, score.extra)
    version = int(outcome["version"]) if "version" in outcome else group.step
    places = dict(zip(group.row_ids, group.advantages, strict=False))
    fields = {name: value for name, value in prompt.fields.items() if name != TASK}
    return {
        "step": version if prompt.is_held_out else version + 1,
        "group_id": None if prompt.is_held_out else group.group_id,
        "is_held_out": prompt.is_held_out,
        "is_kept": prompt.is_kept,
        "prompt_file": _source(prompt, prompts, held_out),
        "prompt_id": prompt.line,
        "epoch": prompt.epoch,
        "prompt": prompt.text,
        "question": prompt.question(prompt_field),
        "fields": json.dumps(fields, ensure_ascii=False, default=str),
        "rewards": {name: parts.get(name) for name in (*functions, *parts)},
        "correct": None if score is None or score.status is not StageStatus.OK else score.correct,
        "error": group.errors.get(row_id) or ("" if score is None else score.error),
        "advantage": places.get(row_id) if own_advantage is None else own_advantage,
        "numbers": json.dumps(
            group.numbers.get(row_id, {}) | group.episodes.get(row_id, {}) | extra
        ),
        "reason": outcome.get("reason"),
    }


def _source(prompt: Prompt, names: Sequence[str], held_out: Mapping[str, str]) -> str:
    """Return the source or file of a prompt; empty for a question of the caller's own."""
    if prompt.is_held_out:
        return held_out.get(prompt.held_out, "")
    return names[prompt.source] if 0 <= prompt.source < len(names) else ""


def as_cell(value: object) -> np.ndarray:
    """Return `value` as JSON, UTF-8, in a uint8 [bytes]; half of a surrogate pair, which a prompt
    file may hold, becomes a question mark."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(errors="replace"), np.uint8)


TOKEN_COLUMNS = (
    *(PROMPT_IDS, RESPONSE_IDS, TOKEN_VERSIONS, GENERATOR_LOGPROBS),
    *(REF_LOGPROBS, TRAINER_LOGPROBS, PROXIMAL_LOGPROBS, LOSS_WEIGHTS, CLIPPED),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A retired rollout: the number of entries of each of its cells, and the cells that its lines
    show."""

    lengths: dict[str, int]
    cells: dict[str, np.ndarray]


class Archive:
    """The lines of storage unit `unit`, in `folder`."""

    def __init__(self, folder: Path, unit: int) -> None:
        self._paths = [folder / f"{name}-{unit}.jsonl" for name in ("rollouts", "kept")]
        self._files: list[TextIO] = []

    def open(self) -> None:
        """Open the files; lines of an earlier session stay."""
        if not self._files:
            for path in self._paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                _drop_unfinished_line(path)
                self._files.append(path.open("a"))

    def close(self) -> None:
        """Close the files; it may be called again. Raises OSError if lines still to be written do
        not fit on the disk."""
        while self._files:
            self._files.pop().close()

    def wants(self, name: str, lengths: np.ndarray, columns: Collection[str]) -> bool:
        """Return whether `append` needs the cells of a column, not only their lengths, of rows that
        have these `columns`."""
        if name in TOKEN_COLUMNS and name != TOKEN_VERSIONS:  # of which every line has the runs
            return RECORD in columns
        if name in (ROUTED_EXPERTS, KEPT_IDS):  # of which no line shows anything
            return False
        return name in COLUMNS or bool((lengths == 1).all())

    def append(self, rows: Mapping[int, Row], outcome: Outcome) -> None:
        """Write the lines of each row. Raises OSError if that is not possible."""
        if not self._files:
            raise RuntimeError("a storage unit must be started before it retires rows")
        lines = [_line(row_id, row, outcome) for row_id, row in rows.items()]
        kept = [
            _kept_line(line, row.cells)
            for line, row in zip(lines, rows.values(), strict=True)
            if RECORD in row.cells
        ]
        for path, file, some in zip(self._paths, self._files, (lines, kept), strict=True):
            try:
                file.writelines(json.dumps(line) + "\n" for line in some)
                file.flush()
            except OSError as error:
                reason = f"cannot write the archive of rollouts: {error.strerror}"
                raise OSError(error.errno, reason, str(path)) from error


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
    episode, conversation = episode_of(row_id)
    if conversation:  # the first has the rollout's own id
        line |= {"episode": episode, "conversation": conversation}
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
    # These columns are those of a recipe's own stages.
    numbers = {name: _number(cell) for name, cell in cells.items() if name not in COLUMNS}
    if numbers:
        line["numbers"] = numbers
    return line


def _kept_line(line: Mapping[str, Any], cells: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the line of a rollout with a record; None stands for values that it lacks.

    `version` is the trainer's version that used the rollout, or the version evaluated. `staleness`
    is that of its oldest token with weight."""
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
    """Return a number, or None for one that JSON has no word for."""
    return float(cell[0]) if math.isfinite(cell[0]) else None


def _numbers(cell: np.ndarray) -> list[int | float | None]:
    """Return the entries, each with as few digits as identify it in the cell's dtype."""
    if cell.dtype.kind in "iu":
        return cell.tolist()
    return [float(str(entry)) if math.isfinite(entry) else None for entry in cell]
