"""Rollouts that can be read after the run: which these are, and what the controller knows of them.

Owns: the choice, and the record that goes to storage before a rollout is retired. Does not own: the
file (`executors/archive.py`) or tokens, which the controller never sees. Invariant: the choice is a
function of seed, epoch and prompt, so a run that resumes chooses alike, and keeps whole groups.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from llamarl.groups import Group
from llamarl.types import Outcome, Prompt, StageStatus


def is_kept(prompt: Prompt, share: float, seed: int) -> bool:
    """Whether the rollouts of `prompt` in its epoch are among the `share` that is kept whole. What
    is kept at one share is kept at every larger one."""
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
    """What the archive says of a rollout beside its arrays: its prompt, from the sources `prompts`
    or the file of its set in `held_out`, with its question in `prompt_field`, and what became of
    it. `rewards` has each of the reward `functions`, None without a result.

    `step` is the one that trained it, or should have; of an evaluation, the version.
    """
    prompt, score = group.prompt, group.scores.get(row_id)
    parts, extra = ({}, {}) if score is None else (score.parts, score.extra)
    version = int(outcome["version"]) if "version" in outcome else group.step
    places = dict(zip(group.row_ids, group.advantages, strict=False))
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
        "fields": json.dumps(prompt.fields, ensure_ascii=False, default=str),
        "rewards": {name: parts.get(name) for name in (*functions, *parts)},
        "correct": None if score is None or score.status is not StageStatus.OK else score.correct,
        "error": group.errors.get(row_id) or ("" if score is None else score.error),
        "advantage": places.get(row_id),
        "numbers": json.dumps(
            group.numbers.get(row_id, {}) | group.episodes.get(row_id, {}) | extra
        ),
        "reason": outcome.get("reason"),
    }


def _source(prompt: Prompt, names: Sequence[str], held_out: Mapping[str, str]) -> str:
    """Empty for a question of the caller's own."""
    if prompt.is_held_out:
        return held_out.get(prompt.held_out, "")
    return names[prompt.source] if 0 <= prompt.source < len(names) else ""


def as_cell(value: object) -> np.ndarray:
    """uint8 [bytes]: `value` as JSON, UTF-8; half of a surrogate pair, which a prompt file may
    hold, as a question mark."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(errors="replace"), np.uint8)
