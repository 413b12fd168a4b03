"""Where a run begins: at version 0 or at a checkpoint, which is checked before any process starts.

Owns: which checkpoint, and whether this run may go on from it. Does not own: checkpoint folders
(`checkpoint.py`) or loading weights. Invariant: what comes back has been read whole and is what was
saved; a checkpoint that is damaged is named and never loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from llamarl import checkpoint
from llamarl.build import make_backlog
from llamarl.config import Config
from llamarl.config.check import require
from llamarl.inputs import Inputs

LOGGER = logging.getLogger(__name__)


def starting_point(
    config: Config, inputs: Inputs, run_dir: str
) -> tuple[dict[str, Any], str | None]:
    """The state and folder of the checkpoint to go on from, if any.

    It may be the last step's: what a killed run still owes, the export, is then made up for.
    ValueError if the folder that checkpoint.resume names, or every one that it could choose, is
    damaged, or if the run differs from the one that was saved.
    """
    resume = config.checkpoint.resume
    if resume == "off":
        return {}, None
    damaged: dict[Path, ValueError] = {}
    if resume == "auto":
        folder, state = _newest_sound(run_dir, damaged)
    else:
        folder, state = Path(resume), checkpoint.read_state(resume)
    if folder is None:
        return {}, None
    require(
        state["version"] <= config.num_steps,
        "num_steps",
        f"be at least the checkpoint's version ({state['version']})",
        config.num_steps,
    )
    make_backlog(config, inputs, state)  # refuses other prompts
    for newer, error in damaged.items():
        reason, kept = error.__cause__ or error, checkpoint.set_aside(newer)
        LOGGER.warning("going on from %s, for %s (kept as %s)", folder.name, reason, kept.name)
    return state, str(folder)


def _newest_sound(
    run_dir: str, damaged: dict[Path, ValueError]
) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint that is what was saved; adds those passed over, and why, to `damaged`.

    ValueError if there are checkpoints and none of them is sound.
    """
    for folder in reversed(checkpoint.committed(run_dir)):
        try:
            return folder, checkpoint.read_state(folder)
        except ValueError as reason:
            damaged[folder] = reason
    if damaged:
        raise next(iter(damaged.values()))
    return None, {}
