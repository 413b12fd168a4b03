"""The index of a sharded checkpoint is read as data, whatever its origin."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from llamarl.trainer.policy import DCP_INDEX_FILE, SavedShards


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
