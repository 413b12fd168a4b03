"""Manifests: what lies in a folder is what was written, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.core import files
from llamarl.core.files import MANIFEST_FILE, verify, verify_if_listed, write, write_part


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    (tmp_path / "inner" / "b.bin").write_bytes(b"b" * 100)
    write(tmp_path)
    return tmp_path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def test_files_as_they_were_written_pass_and_others_beside_them_do_not_matter(folder: Path) -> None:
    verify(folder, "a.bin", "inner/b.bin")
    (folder / "notes.txt").write_text("mine")
    verify(folder)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, "a.bin must hold the bytes that"),
        (lambda path: path.write_bytes(b""), "a.bin must be 200 bytes long, got 0"),
        (lambda path: path.unlink(), "a.bin must be a file of 200 bytes, got none"),
        (replace_by_folder, "a.bin must be a file of 200 bytes, got none"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder / "a.bin")
    with pytest.raises(ValueError, match=words) as caught:
        verify(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "\u0000",
        '{"files": null}',
        '{"files": {"a.bin": 1}}',
        '{"files": {"a.bin": {"bytes": "200", "sha256": ""}}}',
        '{"files": {"../a.bin": {"bytes": 200, "sha256": ""}}}',
    ],
)
def test_a_damaged_manifest_is_named(folder: Path, text: str) -> None:
    (folder / MANIFEST_FILE).write_text(text)
    for check in (verify, verify_if_listed):
        with pytest.raises(ValueError, match=f"{MANIFEST_FILE} must be a manifest"):
            check(folder)


def test_a_folder_without_a_manifest_is_accepted_only_where_that_is_allowed(
    folder: Path,
) -> None:
    (folder / MANIFEST_FILE).unlink()
    verify_if_listed(folder)
    with pytest.raises(ValueError, match=r"manifest\.json must be a manifest .*, got no file"):
        verify(folder)


def test_what_a_rank_hashed_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 10)
        write_part(tmp_path, rank, tmp_path.glob(f"__{rank}_*"))
    (tmp_path / "controller.json").write_text("{}")
    hashed = []
    digest = files._digest
    monkeypatch.setattr(files, "_digest", lambda path: (hashed.append(path.name), digest(path))[1])
    write(tmp_path)
    assert hashed == ["controller.json"]
    listed = json.loads((tmp_path / MANIFEST_FILE).read_text())["files"]
    assert sorted(listed) == ["__0_0.distcp", "__1_0.distcp", "controller.json"]
    assert {path.name for path in tmp_path.iterdir()} == {*listed, MANIFEST_FILE}
    verify(tmp_path)
