"""What the page knows of a run.

Owns: the data that is written into the page, and its rounding. Does not own: which rollouts
(`selection.py`), or how they are shown (`page.js`). Invariant: a token's text stands beside its
numbers; of a text, nothing is interpreted.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llamarl.metrics.trackers import METRICS_FILE, read_metrics

log = logging.getLogger(__name__)

CURVES = {
    "reward": "reward/mean",
    "accuracy": "accuracy/train",
    "evaluation": "evaluation/accuracy",
}
"""The curves of the overview, and their tags in metrics.jsonl."""
SAME = (
    *("row_id", "step", "group_id", "outcome", "reason", "is_held_out", "version", "epoch"),
    *("reward", "rewards", "correct", "error", "advantage", "numbers", "finish", "turns"),
    *("num_prompt_tokens", "num_tokens", "version_min", "version_max", "staleness", "sampling"),
)
"""What a rollout of the page has of its line."""
NUMBERS = ("generator_logprobs", "trainer_logprobs", "ref_logprobs")
WHOLE = ("response_ids", "token_versions", "loss_weights", "clipped")
DIGITS = 6  # of a log-prob

Pieces = Callable[[Sequence[int]], list[str]]
"""The text of each token."""


def page_data(
    run_dir: Path, lines: Iterable[dict[str, Any]], num_found: int, pieces: Pieces | None
) -> dict[str, Any]:
    """Everything that the page shows; without `pieces` tokens have no texts, and only whole texts
    are shown. Damaged lines are left out, with a warning."""
    prompts: dict[tuple[str, int], int] = {}
    texts: list[dict[str, Any]] = []
    rollouts = []
    for line in lines:
        try:
            rollout, prompt = _rollout(line, pieces), _prompt(line)
            place = prompts.setdefault((line["prompt_file"], line["prompt_id"]), len(texts))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            log.warning("rollout %s is not shown: %r", line.get("row_id"), error)
            continue
        if place == len(texts):
            texts.append(prompt)
        rollouts.append(rollout | {"prompt": place})
    return {
        "run": run_dir.resolve().name,
        "num_found": num_found,
        "curves": _curves(run_dir / METRICS_FILE),
        "prompts": texts,
        "rollouts": rollouts,
    }


def _prompt(line: dict[str, Any]) -> dict[str, Any]:
    names = ("prompt_file", "prompt", "question")
    texts = {name: _text(line[name]) for name in names}
    return texts | {"prompt_id": int(line["prompt_id"]), "fields": dict(json.loads(line["fields"]))}


def _rollout(line: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    rollout = {name: line[name] for name in SAME}
    rollout |= {name: int(line[name]) for name in ("row_id", "step", "num_tokens")}
    rollout |= {name: _text(line[name]) for name in ("outcome", "error")}
    rollout |= {"rewards": dict(line["rewards"]), "numbers": dict(json.loads(line["numbers"]))}
    if line["turns"] is not None:
        turns = [(_text(turn["role"]), _text(turn["content"])) for turn in line["turns"]]
        rollout["turns"] = [{"role": role, "content": content} for role, content in turns]
    if line["response_ids"] is not None and pieces is not None:
        texts = {"texts": pieces(line["response_ids"])}
        numbers = {name: _rounded(line[name]) for name in NUMBERS}
        columns = texts | {name: line[name] for name in WHOLE} | numbers
        lengths = {len(column) for column in columns.values() if column is not None}
        if lengths != {len(texts["texts"])} or columns["token_versions"] is None:
            raise ValueError(f"columns of {sorted(lengths)} tokens")
        rollout["tokens"] = columns
        # As the model saw it: an environment may have added to the prompt.
        rollout["prompt_text"] = "".join(pieces(line["prompt_ids"]))
    return rollout


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _rounded(values: Sequence[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if value is None else round(value, DIGITS) for value in values]


def _curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each curve."""
    steps = read_metrics(path, CURVES.values()) if path.exists() else {}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for step, line in steps.items():
        for name, tag in CURVES.items():
            value = line.get(tag)
            if isinstance(value, int | float) and math.isfinite(value):
                found[name].append((step, value))
    return found
