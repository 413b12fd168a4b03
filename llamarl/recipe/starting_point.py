"""A run begins at version 0 or at a checkpoint, which is checked before any process starts.

The state returned was read whole and is what was saved; a damaged checkpoint is named and never
loaded."""

import logging
from pathlib import Path
from typing import Any

from llamarl.core import checkpoint, files
from llamarl.core.config import Config
from llamarl.core.fields import require
from llamarl.metrics.held_out import is_sound
from llamarl.recipe.inputs import Inputs, check_identity, identity, make_prompts

LOGGER = logging.getLogger(__name__)
WRITTEN = ("*.json", "*.jsonl", "archive/*.jsonl", "spans/*.jsonl", "config.yaml")
COUNTS = ("version", "position", "next_group_id", "next_row_id")
MAX_COUNT = 2**53  # JSON's numbers are exact up to here
MAX_SHOWN = 60  # characters of a wrong value


def starting_point(
    config: Config, inputs: Inputs, run_dir: str
) -> tuple[dict[str, Any], str | None]:
    """Return the state and folder of the checkpoint to resume from, if any.

    It may be that of the last step, after which only an evaluation or the export is missing.
    ValueError if the folder that checkpoint.resume names, or every one that it could choose, is
    damaged, if the run differs from the one that was saved, or if the files that this run would
    append to are damaged.
    """
    resume = config.checkpoint.resume
    if resume == "off":
        return {}, None
    damaged: dict[Path, ValueError] = {}
    if resume == "auto":
        for path in (path for pattern in WRITTEN for path in Path(run_dir).glob(pattern)):
            require(path.is_file(), str(path), "be a file", "a folder or something else")
        folder, state = _newest_sound(run_dir, damaged)
    else:
        folder, state = Path(resume), _read(Path(resume))
    if folder is None:
        return {}, None
    must = f"be at least the checkpoint's version ({state['version']})"
    config.require(state["version"] <= config.most_steps, "num_steps", must)
    check_identity(state["identity"], identity(config, inputs))
    make_prompts(config, inputs, state)  # refuses open prompts that are not in the files
    if resume == "auto":
        try:
            files.verify_positions(run_dir, state["positions"])
        except ValueError as lost:
            advice = f"a new run_dir with checkpoint.resume={folder}"
            message = f"{lost}: restore the file, or resume without it in {advice}"
            raise ValueError(message) from lost
    for newer, error in damaged.items():
        reason, kept = error.__cause__ or error, checkpoint.set_aside(newer)
        LOGGER.warning("resuming from %s, for %s (kept as %s)", folder.name, reason, kept.name)
    return state, str(folder)


def _newest_sound(
    run_dir: str, damaged: dict[Path, ValueError]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest undamaged checkpoint and its state, and add newer ones, with their errors,
    to `damaged`. ValueError if all checkpoints are damaged."""
    for folder in reversed(checkpoint.committed(run_dir)):
        try:
            return folder, _read(folder)
        except ValueError as reason:
            damaged[folder] = reason
    if damaged:
        raise next(iter(damaged.values()))
    return None, {}


def _read(folder: Path) -> dict[str, Any]:
    """Return the state in `folder`, all files verified; ValueError if a run could not have saved
    it."""
    state = checkpoint.read_state(folder)

    def check(condition: bool, name: str, must: str, got: object = None) -> None:
        value = state.get(name)
        text = repr(value)
        short = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
        shown = value if isinstance(value, int) else short
        require(condition, f"{name} in {folder / checkpoint.STATE_FILE}", must, got or shown)

    for name in COUNTS:
        count = state.get(name)
        is_count = type(count) is int and 0 <= count <= MAX_COUNT
        check(is_count, name, f"be a whole number from 0 to {MAX_COUNT}")
    for name in ("pending", "backlog"):
        check(_are_pairs(state.get(name)), name, "list pairs of epoch and prompt")
    walks = state.get("walks")
    are_walks = _are_pairs(walks) and all(0 <= drawn <= passed for passed, drawn in walks or [])
    are_walks = are_walks and sum(drawn for _, drawn in walks or []) == state["position"]
    check(are_walks, "walks", "list pairs of prompts passed and drawn, position in all")
    check(type(state.get("silent", "")) is str, "silent", "be text")
    first = [*map(tuple, state["pending"]), *map(tuple, state["backlog"])]
    doubled = len(first) - len(set(first))
    check(not doubled, "open prompts", "differ", f"{doubled} that are there twice")
    # An open prompt was drawn, a drawn prompt opens a group, and a group has rows.
    bounds = [len(first), state["position"], state["next_group_id"], state["next_row_id"]]
    must = "fit the open prompts, next_group_id and next_row_id"
    check(bounds == sorted(bounds), "position", must)
    evaluated = state.get("evaluated", -1)
    is_version = type(evaluated) is int and -1 <= evaluated <= state["version"]
    check(is_version, "evaluated", "be a version")
    check(type(state.get("solved", "")) is str, "solved", "be text")
    best = state.get("best", {})
    check(is_sound(best, state["version"]), "best", "be a version, its value and a count")
    check(isinstance(state.get("identity"), dict), "identity", "be an object")
    check(files.is_sound(state.get("positions")), "positions", "list parts")
    return state


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in value
    )
