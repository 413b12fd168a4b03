"""What the page knows of a run.

Owns: the data that is written into the page, and its rounding. Does not own: which rollouts
(`selection.py`), or how they are shown (`page.js`). Invariant: a token's text stands beside its
numbers; of a text, nothing is interpreted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llamarl.metrics.trackers import METRICS_FILE, read_metrics

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
    are shown."""
    prompts: dict[tuple[str, int], int] = {}
    texts: list[dict[str, Any]] = []
    rollouts = []
    for line in lines:
        rollout = {name: line[name] for name in SAME}
        key = line["prompt_file"], line["prompt_id"]
        if key not in prompts:
            prompts[key] = len(texts)
            names = ("prompt_file", "prompt_id", "prompt", "question", "fields")
            texts.append({name: line[name] for name in names})
        rollout["prompt"] = prompts[key]
        if line["response_ids"] is not None and pieces is not None:
            rollout["tokens"] = {"texts": pieces(line["response_ids"])} | {
                name: line[name] for name in WHOLE
            }
            rollout["tokens"] |= {name: _rounded(line[name]) for name in NUMBERS}
        rollouts.append(rollout)
    return {
        "run": run_dir.resolve().name,
        "num_found": num_found,
        "curves": _curves(run_dir / METRICS_FILE),
        "prompts": texts,
        "rollouts": rollouts,
    }


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
