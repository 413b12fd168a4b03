"""Checkpoints on disk: only whole ones are found, and their index is read as data."""

import asyncio
import errno
import os
import pickle
import random
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from llamarl.core import checkpoint, files
from llamarl.core.checkpoint import (
    begin,
    commit,
    committed,
    latest,
    mark_best,
    marked_best,
    prune,
    read_state,
)
from llamarl.trainer.policy import DCP_INDEX_FILE, SavedShards
from tests.fakes import SavingTrainer


def save(run_dir, version, **state):
    folder = begin(run_dir, version)
    (folder / "shard.distcp").write_bytes(b"x" * 64)
    return commit(folder, {"version": version, **state})


def test_latest_is_the_newest_committed_version_with_its_state(tmp_path):
    assert latest(tmp_path) is None
    for version in (2, 10, 9):
        save(tmp_path, version, pending=[version])
    path = latest(tmp_path)
    assert path.name == "step-00000010"
    assert read_state(path) == {"version": 10, "pending": [10]}
    assert (path / "shard.distcp").stat().st_size == 64


def test_an_uncommitted_save_is_ignored_and_removed_by_the_next_one(tmp_path):
    good = save(tmp_path, 1)
    half = begin(tmp_path, 2)
    (half / "shard.distcp").write_bytes(b"x")
    assert latest(tmp_path) == good
    again = begin(tmp_path, 3)
    assert not half.exists()
    assert list(again.iterdir()) == []


def test_saving_a_version_again_replaces_it_without_a_moment_without_one(tmp_path, monkeypatch):
    save(tmp_path, 4, attempt=1)
    seen = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda *a, **k: (seen.append(latest(tmp_path)), rmtree(*a, **k))
    )
    for attempt in (2, 3):
        save(tmp_path, 4, attempt=attempt)
        assert read_state(latest(tmp_path))["attempt"] == attempt
    assert [read_state(path)["attempt"] for path in (latest(tmp_path),)] == [3]
    assert None not in seen
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_prune_keeps_the_newest_and_zero_keeps_all(tmp_path):
    for version in range(5):
        save(tmp_path, version)
    prune(tmp_path, 0)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5
    prune(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


def test_the_best_checkpoint_is_marked_and_spared(tmp_path):
    for version in range(1, 6):
        save(tmp_path, version)
    assert marked_best(tmp_path) is None
    for version in (1, 2):
        mark_best(tmp_path, version)
        mark = tmp_path / "checkpoints" / "best"
        assert marked_best(tmp_path) == (tmp_path / f"checkpoints/step-0000000{version}").resolve()
        assert read_state(mark)["version"] == version, "a run may resume from it by this name"
    prune(tmp_path, 1, lambda version: version in (2, 3))
    names = sorted(path.name for path in committed(tmp_path))
    assert names == ["step-00000002", "step-00000003", "step-00000005"]
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "checkpoints", copied / "checkpoints")  # the mark is a folder now
    mark_best(copied, 5)
    assert marked_best(copied).name == "step-00000005"
    mark_best(tmp_path, 4)
    assert marked_best(tmp_path) is None, "its checkpoint is not there"
    assert not mark.is_symlink()


def test_commit_refuses_the_state_of_another_version(tmp_path):
    with pytest.raises(ValueError, match=r"must be that of .*step-00000003, got 4"):
        commit(begin(tmp_path, 3), {"version": 4})
    assert latest(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "llamarl-manifest.json must list controller.json, got 0 other files"),
        ("{", "be a sound checkpoint"),
        ('{"pending": []}', "names no version"),
        ("[1]", "hold a JSON object, got list"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_its_reason(tmp_path, content, message):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    if content is not None:
        (folder / "controller.json").write_text(content)
    files.write(folder)
    with pytest.raises(ValueError, match=f"checkpoint.resume must .*{message}"):
        read_state(folder)


def test_an_unfinished_folder_cannot_be_resumed_by_name(tmp_path):
    folder = begin(tmp_path, 1)
    (folder / "controller.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="not the name of a committed checkpoint"):
        read_state(folder)


def test_a_save_that_would_not_fit_is_refused_before_it_starts(tmp_path, monkeypatch):
    good = save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(OSError, match="No space left on device; free some or lower") as caught:
        begin(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]


def test_a_disk_that_fills_up_during_a_save_leaves_only_the_good_checkpoint(tmp_path):
    full = SavingTrainer(error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    good = asyncio.run(checkpoint.save(tmp_path, SavingTrainer(), {"version": 1}, keep=1))
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(checkpoint.save(tmp_path, full, {"version": 2}, keep=1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]
    newer = asyncio.run(checkpoint.save(tmp_path, SavingTrainer(), {"version": 3}, keep=1))
    assert list((tmp_path / "checkpoints").iterdir()) == [newer]
    assert checkpoint.read_state(newer)["version"] == 3


def test_records_are_cut_to_what_they_were_at_the_checkpoint(tmp_path):
    assert not checkpoint.holds_run(tmp_path)
    metrics, archive = tmp_path / "metrics.jsonl", tmp_path / "archive" / "rollouts-0.jsonl"
    archive.parent.mkdir()
    metrics.write_text("")
    assert not checkpoint.holds_run(tmp_path), "a run that wrote nothing is none"
    metrics.write_text("one\n")
    assert checkpoint.holds_run(tmp_path)
    folder = asyncio.run(checkpoint.save(tmp_path, SavingTrainer(), {"version": 1}, keep=1))
    metrics.write_text("one\ntwo\n")
    archive.write_text("row\n")
    files.cut(tmp_path, read_state(folder)["positions"])
    assert metrics.read_text() == "one\n"
    assert archive.read_text() == ""
    files.cut(tmp_path, {})
    assert metrics.read_text() == ""
    assert checkpoint.holds_run(tmp_path), "a checkpoint alone is enough to lose"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_what_torch_saved_is_read_and_loads(folder: Path) -> None:
    shards = SavedShards(folder)
    assert shards.shapes() == {"a": (2, 3), "b": ()}
    state = {"a": torch.zeros(2, 3), "b": torch.ones((), dtype=torch.int64)}
    dcp.load(state, storage_reader=shards, no_dist=True)
    assert state["a"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert state["b"] == 0


class Code:
    """Pickled, it runs a command when it is read."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._witness}",)


def test_code_in_an_index_is_refused_before_it_runs(folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (folder / DCP_INDEX_FILE).write_bytes(pickle.dumps(Code(witness)))
    with pytest.raises(
        ValueError, match=r"\.metadata must be .*got posix\.system, which no trainer"
    ):
        SavedShards(folder).shapes()
    assert not witness.exists()
    pickle.loads((folder / DCP_INDEX_FILE).read_bytes())
    assert witness.exists(), "else it proves nothing"


def piece(**changed: Any) -> Callable[[Path], object]:
    """An index in which the first piece of a tensor differs in these."""

    def damage(folder: Path) -> None:
        index = SavedShards(folder).read_metadata()
        index.storage_meta = StorageMeta()
        vars(next(iter(index.storage_data.values()))).update(changed)
        (folder / DCP_INDEX_FILE).write_bytes(pickle.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (piece(relative_path="../x"), "outside the folder"),
        (piece(relative_path="none"), "No such file"),
        (piece(length=10**9), r"past the end of __0_0\.distcp"),
        (lambda folder: (folder / DCP_INDEX_FILE).unlink(), r"\.metadata must be the index of a"),
    ],
    ids=["elsewhere", "no piece", "piece too long", "no index"],
)
def test_an_index_that_is_gone_or_leads_elsewhere_is_refused(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=words):
        SavedShards(folder).shapes()


def test_any_damage_is_one_line_or_harmless(folder: Path) -> None:
    good = (folder / DCP_INDEX_FILE).read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.choice([1, 1, 8])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (folder / DCP_INDEX_FILE).write_bytes(
            data[: draw.choice([len(data), draw.randrange(len(data))])]
        )
        reason = refusal(SavedShards(folder))
        refused += bool(reason)
        assert reason == "" or "must be the index of a checkpoint" in reason.splitlines()[-1]
        assert len(reason.splitlines()) <= 1
    assert refused > 150


def refusal(shards: SavedShards) -> str:
    """Why these are not read; nothing else than a ValueError may say so."""
    try:
        shards.shapes()
    except ValueError as error:
        return str(error)
    return ""
