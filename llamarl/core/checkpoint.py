"""Makes, commits, finds and prunes the checkpoints of a run on disk.

A folder called step-... is complete; an unfinished one has another name until one atomic rename, so
a kill at any moment leaves the newest committed checkpoint as it was."""

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from llamarl.core import files as manifest
from llamarl.core import files as positions
from llamarl.core.faces import Checkpointed
from llamarl.core.files import read_object

STATE_FILE = "controller.json"
BEST = "best"  # a link beside the checkpoints
_UNFINISHED = "unfinished-"
_DAMAGED = "damaged-"
_COMMITTED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


async def save(
    run_dir: str | Path,
    trainer: Checkpointed,
    state: Mapping[str, Any],
    keep: int,
    on_copied: Callable[[], None] | None = None,
    best: Callable[[], int] = lambda: 0,
    is_spared: Callable[[int], bool] = lambda version: False,
) -> Path:
    """Save the trainer and `state` as one checkpoint of state["version"]; return its folder.

    With `on_copied` the trainer is saved from a snapshot, and `on_copied` is called as soon as
    training may go on; if there is no memory for a snapshot it is not called. Also saves the
    positions of the files that the run appends to. The newest `keep` checkpoints stay (0: all), the
    `best` one, which is marked, and those of versions that are spared; `best` and `is_spared` are
    asked once this one is committed. A save that fails leaves no unfinished folder, which would
    keep a full disk full.
    """
    num_bytes = positions.measure(run_dir)  # first: they must end where `state` does
    before = latest(run_dir)
    folder = begin(run_dir, state["version"])
    try:
        is_copied = on_copied is not None and await trainer.snapshot()
        if on_copied is not None and is_copied:
            on_copied()
        await trainer.save(str(folder), is_copied)
        known = _saved_positions(before) if before else {}
        parts = await asyncio.to_thread(positions.digest, run_dir, num_bytes, known)
        state = {**state, "positions": parts}
        folder_saved = await asyncio.to_thread(commit, folder, state)  # flushing may take seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after a commit it has another name
    version = best()
    mark_best(run_dir, version)
    prune(run_dir, keep, lambda each: each == version or is_spared(each))
    return folder_saved


def begin(run_dir: str | Path, version: int) -> Path:
    """Make the empty folder that trainer ranks save `version` into, for `commit`.

    Removes folders that a killed save left. OSError (ENOSPC) if less space is free than the newest
    checkpoint takes.
    """
    root = Path(run_dir) / "checkpoints"
    with _clear_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(_UNFINISHED + "*"):
            stale.unlink() if stale.is_symlink() else shutil.rmtree(stale)
        previous = latest(run_dir)
        files = previous.rglob("*") if previous is not None else ()
        if shutil.disk_usage(root).free < sum(file.stat().st_size for file in files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder = root / f"{_UNFINISHED}step-{version:08d}"
        folder.mkdir()
    return folder


def commit(folder: Path, state: Mapping[str, Any]) -> Path:
    """Add `state` (JSON, with the "version" given to `begin`) and the manifest of all files, flush
    all to disk and rename the folder; return the committed folder.

    If this version was committed before (by a run resumed from an older checkpoint), the old folder
    is removed after that.
    """
    name = folder.name.removeprefix(_UNFINISHED)
    if name != f"step-{state['version']:08d}":
        raise ValueError(f"state['version'] must be that of {folder}, got {state['version']}")
    root = folder.parent
    older = [path for path in committed(root.parent) if path.name.split(".")[0] == name]
    if older:
        name += f".{_order(older[-1])[1] + 1}"
    with _clear_errors(root):
        (folder / STATE_FILE).write_text(json.dumps(dict(state), allow_nan=False))
        manifest.write(folder)
        for path in [*folder.rglob("*"), folder]:
            _flush(path)
        renamed = folder.rename(root / name)
        _flush(root)
    for path in older:
        _remove(path)
    return renamed


def latest(run_dir: str | Path) -> Path | None:
    """Return the newest committed checkpoint of this run, or None."""
    return next(reversed(committed(run_dir)), None)


def committed(run_dir: str | Path) -> list[Path]:
    """Return all committed checkpoints of this run, oldest version first."""
    paths = Path(run_dir, "checkpoints").glob("step-*")
    return sorted((path for path in paths if _COMMITTED.fullmatch(path.name)), key=_order)


def version_of(folder: Path) -> int:
    """Return the version that the committed checkpoint `folder` holds."""
    return _order(folder)[0]


def read_state(path: str | Path) -> dict[str, Any]:
    """Verify every file of a checkpoint, then return the state that was committed.

    ValueError, naming the file, if `path` is not a committed checkpoint, or damaged.
    """
    folder = Path(path)
    must = f"checkpoint.resume must be off, auto or a folder called step-NUMBER, got {path}"
    if _COMMITTED.fullmatch(folder.resolve().name) is None:
        raise ValueError(f"{must}, which is not the name of a committed checkpoint")
    try:
        manifest.verify(folder, STATE_FILE)
        state = read_object(folder / STATE_FILE)
    except ValueError as error:
        raise ValueError(f"checkpoint.resume must be a sound checkpoint, but {error}") from error
    if type(state.get("version")) is not int or state["version"] < 0:
        raise ValueError(f"{must}, whose {STATE_FILE} names no version")
    return state


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is neither resumed from nor counted."""
    name = _DAMAGED + folder.name
    paths = (folder.with_name(f"{name}-{i}" if i else name) for i in count())
    return folder.rename(next(path for path in paths if not path.exists()))


def holds_run(run_dir: str | Path) -> bool:
    """Return whether a run in this folder got further than its start."""
    return latest(run_dir) is not None or any(positions.measure(run_dir).values())


def prune(
    run_dir: str | Path, keep: int, is_spared: Callable[[int], bool] = lambda version: False
) -> None:
    """Remove all committed checkpoints except the newest `keep` and those of versions that are
    spared; 0 keeps all."""
    for path in committed(run_dir)[:-keep] if keep else ():
        if not is_spared(version_of(path)):
            _remove(path)


def find(run_dir: str | Path, version: int) -> Path | None:
    """Return the committed checkpoint of this version, if there is one."""
    return next((path for path in committed(run_dir) if version_of(path) == version), None)


def marked_best(run_dir: str | Path) -> Path | None:
    """Return the checkpoint that is marked as the best one, or None."""
    folder = Path(run_dir, "checkpoints", BEST).resolve()
    return folder if _COMMITTED.fullmatch(folder.name) and folder.is_dir() else None


def mark_best(run_dir: str | Path, version: int) -> None:
    """Make checkpoints/best a link to the checkpoint of this version; remove the link if there is
    none."""
    mark, folder = Path(run_dir, "checkpoints", BEST), find(run_dir, version)
    if mark.is_dir() and not mark.is_symlink():  # what it led to, in a copy of the run
        shutil.rmtree(mark)
    if folder is None:
        mark.unlink(missing_ok=True)
        return
    unfinished = mark.with_name(f"{_UNFINISHED}{BEST}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(folder.name)
    os.replace(unfinished, mark)


def _saved_positions(folder: Path) -> dict[str, positions.Parts]:
    """Return the positions in an earlier checkpoint, or none if they cannot be read."""
    try:
        saved = read_object(folder / STATE_FILE).get("positions")
    except ValueError:
        return {}
    return saved if positions.is_sound(saved) else {}


def _order(path: Path) -> tuple[int, int]:
    """Return (version, attempt) of a committed checkpoint."""
    match = _COMMITTED.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 0)


def _remove(path: Path) -> None:
    """Remove a committed checkpoint so that a kill half-way leaves no incomplete step-...
    folder."""
    shutil.rmtree(path.rename(path.with_name(_UNFINISHED + path.name)))


def _flush(path: Path) -> None:
    """Flush a file or folder to disk (fsync): a rename must not reach the disk before the files
    do."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _clear_errors(root: Path) -> Iterator[None]:
    """Let the error of a full disk say what to change."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{os.strerror(errno.ENOSPC)}; free some or lower checkpoint.keep; checkpoints in"
        raise OSError(errno.ENOSPC, message, str(root)) from error
