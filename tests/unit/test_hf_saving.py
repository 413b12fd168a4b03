"""An export is whole or not there: disks that fill or refuse, kills, failed renames."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.model import hf
from tests.tiny_checkpoints import CASES, write_reference
from tests.unit.test_hf import parameters

Weights = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_reference(folder, **CASES["qwen25"])
    return folder


def test_weights_that_are_not_numbers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = parameters(checkpoint)
    weights["model.norm.weight"][3] = torch.inf
    hf.save(tmp_path / "out", weights.items(), source_folder=checkpoint, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* must hold finite numbers"):
        hf.load_into(parameters(checkpoint), tmp_path / "out")


def breaking(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:5]
    raise OSError("the disk is gone")


FIRST = "model.embed_tokens.weight"
WRONG: dict[str, tuple[Callable[[Weights], Any], type[Exception], str]] = {
    "disk gone": (breaking, OSError, "the disk is gone"),
    "one missing": (
        lambda w: [(name, w[name]) for name in w if name != "model.norm.weight"],
        RuntimeError,
        r"got none of \['model.norm.weight'\]",
    ),
    "one too many": (
        lambda w: [*w.items(), ("other", torch.zeros(1))],
        ValueError,
        "model's parameters, each once, got 'other'",
    ),
    "shape": (lambda w: [(FIRST, torch.zeros(3, 3))], ValueError, f"{FIRST} must have shape"),
    "twice": (lambda w: [*w.items(), (FIRST, w[FIRST])], ValueError, f"each once, got '{FIRST}'"),
}


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG.values(), ids=WRONG)
def test_a_failed_save_leaves_what_stood_there_and_nothing_else(
    wrong: Callable[[Weights], Any],
    kind: type[Exception],
    words: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    out, weights = tmp_path / "out", parameters(checkpoint)
    hf.save(out, weights.items(), source_folder=checkpoint, dtype=torch.float32)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(kind, match=words):
        hf.save(out, wrong(weights), source_folder=checkpoint, dtype=torch.float32)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_a_disk_that_refuses_a_file_is_an_error_of_the_operating_system(
    checkpoint: Path, tmp_path: Path
) -> None:
    weights = parameters(checkpoint)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            hf.save(
                tmp_path / "out", weights.items(), source_folder=checkpoint, dtype=torch.float32
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_good_save_replaces_the_folder_whole_even_its_own_source(checkpoint: Path) -> None:
    doubled = {name: tensor * 2 for name, tensor in parameters(checkpoint).items()}
    (checkpoint / "stale.safetensors").write_bytes(b"")
    hf.save(checkpoint, doubled.items(), source_folder=checkpoint, dtype=torch.float32)
    assert not (checkpoint / "stale.safetensors").exists()
    for name, tensor in parameters(checkpoint).items():
        assert torch.equal(tensor, doubled[name])
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]


def test_a_failed_rename_puts_the_old_folder_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if "unfinished" in self.name:
            raise PermissionError("the file system says no")
        return rename(self, target)

    weights = parameters(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        hf.save(checkpoint, weights.items(), source_folder=checkpoint, dtype=torch.float32)
    assert sorted(path.name for path in checkpoint.iterdir()) == names
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]


def test_a_save_killed_between_its_renames_loses_nothing(checkpoint: Path) -> None:
    out = checkpoint.with_name("out")
    shutil.copytree(checkpoint, checkpoint.with_name(".out.replaced"))  # the state after the kill
    with pytest.raises(ValueError, match="got 'unknown'"):
        hf.save(out, [("unknown", torch.zeros(1))], source_folder=checkpoint, dtype=torch.float32)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (checkpoint, out)]
    assert names[0] == names[1]


def test_a_full_disk_is_an_error_before_anything_is_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    asked: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("a tensor")
        yield from parameters(checkpoint).items()

    out = checkpoint.with_name("out")
    with pytest.raises(
        OSError, match=r"No space left on device: the weights need .* 1000 are free"
    ):
        hf.save(out, tensors(), source_folder=checkpoint, dtype=torch.float32)
    assert not asked
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]
