"""What the page knows of a run.

Owns: the data that is written into the page, and its rounding. Does not own: which rollouts
(`selection.py`), what a line must say (`kept_line.py`), or how they are shown (`page.js`).
Invariant: a token's text stands beside its numbers; of a text, nothing is interpreted.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from llamarl.metrics.provenance import CONFIG_FILE
from llamarl.metrics.trackers import METRICS_FILE, read_metrics
from llamarl.view.kept_line import LOGPROBS, WHOLE, is_number, is_whole

CURVES = {
    "reward": "reward/mean",
    "accuracy": "accuracy/train",
    "evaluation": "evaluation/accuracy",
}
"""The curves of the overview, and their tags in metrics.jsonl."""
SAME = (
    *("row_id", "step", "group_id", "outcome", "reason", "is_held_out", "version"),
    *("reward", "rewards", "correct", "error", "advantage", "numbers", "finish", "turns"),
    *("num_prompt_tokens", "num_tokens", "version_min", "version_max", "staleness"),
)
"""What a rollout of the page has of its line."""
PROMPT = ("prompt_file", "prompt_id", "question", "fields")
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, yaml.YAMLError)
"""What reading a config may raise."""
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
        place = prompts.setdefault((line["prompt_file"], line["prompt_id"]), len(texts))
        if place == len(texts):
            texts.append({name: line[name] for name in PROMPT})
        rollouts.append(_rollout(line, pieces) | {"prompt": place})
    return {
        "run": run_dir.resolve().name,
        "num_found": num_found,
        "curves": _curves(run_dir / METRICS_FILE),
        "sets": _sets(run_dir / CONFIG_FILE),
        "prompts": texts,
        "rollouts": rollouts,
    }


def _sets(path: Path) -> dict[str, str]:
    """The name of each held-out set by its file, as far as the run's config can be read."""
    try:
        sets = yaml.safe_load(path.read_bytes())["evaluation"]["sets"]
        return {str(file): str(name) for name, file in sets.items()}
    except (*DAMAGED, OSError):
        return {}


def _rollout(line: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    rollout = {name: line[name] for name in SAME}
    rollout["prompt_text"] = line["prompt"]  # an environment may have made it, of one row several
    if line["response_ids"] is not None and pieces is not None:
        texts = {"texts": pieces(line["response_ids"])}
        logprobs = {name: _rounded(line[name]) for name in LOGPROBS}
        rollout["tokens"] = texts | {name: line[name] for name in WHOLE} | logprobs
        rollout["prompt_text"] = "".join(pieces(line["prompt_ids"]))  # with special tokens
    return rollout


def _rounded(values: Sequence[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if value is None else round(value, DIGITS) for value in values]


def _curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each curve."""
    steps = read_metrics(path, CURVES.values()) if path.is_file() else {}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for step, line in steps.items():
        for name, tag in CURVES.items():
            value: Any = line.get(tag)
            if is_whole(step) and is_number(value):
                found[name].append((step, value))
    return found
