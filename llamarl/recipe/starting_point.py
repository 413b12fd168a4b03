"""Where a run begins: at version 0 or at a checkpoint, which is checked before any process starts.

Owns: which checkpoint, and whether this run may go on from it. Does not own: checkpoint folders
(`checkpoint.py`) or loading weights. Invariant: what comes back has been read whole and is what was
saved; a checkpoint that is damaged is named and never loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llamarl.checkpoints import checkpoint, records
from llamarl.config import Config
from llamarl.config.check import require
from llamarl.recipe.inputs import Inputs, check_identity, identity, make_prompts

LOGGER = logging.getLogger(__name__)
WRITTEN = ("*.json", "*.jsonl", "archive/*.jsonl", "spans/*.jsonl*", "config.yaml")
COUNTS = ("version", "position", "next_group_id", "next_row_id")
MAX_COUNT = 2**53  # JSON's numbers are exact up to here


def starting_point(
    config: Config, inputs: Inputs, run_dir: str
) -> tuple[dict[str, Any], str | None]:
    """The state and folder of the checkpoint to go on from, if any.

    It may be the last step's: then the last evaluation and the export may be left to do.
    ValueError if the folder that checkpoint.resume names, or every one that it could choose, is
    damaged, if the run differs from the one that was saved, or if the records that this run would
    go on with are damaged.
    """
    resume = config.checkpoint.resume
    if resume == "off":
        return {}, None
    damaged: dict[Path, ValueError] = {}
    if resume == "auto":
        _check_places(run_dir)
        folder, state = _newest_sound(run_dir, damaged)
    else:
        folder, state = Path(resume), _read(Path(resume))
    if folder is None:
        return {}, None
    require(
        state["version"] <= config.num_steps,
        "num_steps",
        f"be at least the checkpoint's version ({state['version']})",
        config.num_steps,
    )
    check_identity(state["identity"], identity(config, inputs))
    make_prompts(config, inputs, state)  # refuses prompts that are not there
    if resume == "auto":
        _check_records(run_dir, folder, state)
    for newer, error in damaged.items():
        reason, kept = error.__cause__ or error, checkpoint.set_aside(newer)
        LOGGER.warning("going on from %s, for %s (kept as %s)", folder.name, reason, kept.name)
    return state, str(folder)


def _check_places(run_dir: str) -> None:
    """ValueError unless what stands where this run will write are files that it can go on with."""
    for pattern in WRITTEN:
        for path in Path(run_dir).glob(pattern):
            require(path.is_file(), str(path), "be a file", "a folder or something else")


def _newest_sound(
    run_dir: str, damaged: dict[Path, ValueError]
) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint that is what was saved; adds those passed over, and why, to `damaged`.

    ValueError if there are checkpoints and none of them is sound.
    """
    for folder in reversed(checkpoint.committed(run_dir)):
        try:
            return folder, _read(folder)
        except ValueError as reason:
            damaged[folder] = reason
    if damaged:
        raise next(iter(damaged.values()))
    return None, {}


def _read(folder: Path) -> dict[str, Any]:
    """The state in `folder`, all files verified; ValueError if a run could not have saved it."""
    state = checkpoint.read_state(folder)
    path = folder / checkpoint.STATE_FILE
    for name in COUNTS:
        count = state.get(name)
        sound = type(count) is int and 0 <= count <= MAX_COUNT
        require(sound, f"{name} in {path}", f"be a whole number from 0 to {MAX_COUNT}", count)
    first = []
    for name in ("pending", "backlog"):
        pairs = state.get(name)
        sound = isinstance(pairs, list) and all(
            isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in pairs
        )
        require(sound, f"{name} in {path}", "list pairs of epoch and prompt", _short(pairs))
        first += [tuple(pair) for pair in pairs or ()]
    doubled = len(first) - len(set(first))
    require(not doubled, f"open prompts in {path}", "differ", f"{doubled} that stand there twice")
    # An open prompt was drawn, what is drawn opens a group, and a group has rows.
    bounds = [len(first), state["position"], state["next_group_id"], state["next_row_id"]]
    require(
        bounds == sorted(bounds),
        f"position in {path}",
        "fit the open prompts, next_group_id and next_row_id",
        state["position"],
    )
    evaluated, solved = state.get("evaluated", -1), state.get("solved", "")
    sound = type(evaluated) is int and -1 <= evaluated <= state["version"]
    require(sound, f"evaluated in {path}", "be a version", _short(evaluated))
    require(type(solved) is str, f"solved in {path}", "be text", _short(solved))
    require(
        isinstance(state.get("identity"), dict),
        f"identity in {path}",
        "be an object",
        _short(state.get("identity")),
    )
    require(
        records.is_sound(state.get("records")),
        f"records in {path}",
        "list parts",
        _short(state.get("records")),
    )
    return state


def _check_records(run_dir: str, folder: Path, state: dict[str, Any]) -> None:
    try:
        records.verify(run_dir, state["records"])
    except ValueError as error:
        raise ValueError(
            f"{error}: restore the file, or go on without it in a new run_dir with "
            f"checkpoint.resume={folder}"
        ) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
