"""What lies in a folder is what was written: manifests of files, and positions in growing ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core import files
from llamarl.core.files import (
    MANIFEST_FILE,
    MAX_PARTS,
    cut,
    digest,
    is_sound,
    measure,
    verify,
    verify_if_listed,
    verify_positions,
    write,
    write_part,
)


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


def test_a_folder_without_a_manifest_is_accepted_only_where_that_is_allowed(folder: Path) -> None:
    (folder / MANIFEST_FILE).unlink()
    verify_if_listed(folder)
    with pytest.raises(ValueError, match=r"manifest\.json must be a manifest .*, got no file"):
        verify(folder)


def test_a_manifest_has_what_each_rank_hashed_and_the_rest(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 10)
        write_part(tmp_path, rank, tmp_path.glob(f"__{rank}_*"))
    (tmp_path / "controller.json").write_text("{}")
    write(tmp_path)
    listed = json.loads((tmp_path / MANIFEST_FILE).read_text())["files"]
    assert sorted(listed) == ["__0_0.distcp", "__1_0.distcp", "controller.json"]
    assert {path.name for path in tmp_path.iterdir()} == {*listed, MANIFEST_FILE}
    verify(tmp_path)
    write_part(tmp_path, 0, tmp_path.glob("__0_*"))
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 10)
    write(tmp_path)
    with pytest.raises(ValueError, match=r"__0_0\.distcp must hold the bytes"):
        verify(tmp_path)  # what a rank hashed is not hashed again


def write_lines(path: Path, numbers: range, mixed: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"row_id": number}) + "\n" for number in numbers)
        file.write(mixed)


def test_a_file_is_measured_in_whole_lines_and_cut_there(tmp_path: Path) -> None:
    path = tmp_path / "archive" / "rollouts-0.jsonl"
    write_lines(path, range(3))
    whole = path.read_text()
    write_lines(path, range(0), mixed='{"row_id": 3')  # a storage process is writing
    saved = digest(tmp_path, measure(tmp_path), {})
    write_lines(path, range(0), mixed="}\n")
    write_lines(path, range(9))
    verify_positions(tmp_path, saved)
    cut(tmp_path, saved)
    assert path.read_text() == whole


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    read = []
    whole_hash = files._hash
    monkeypatch.setattr(
        files, "_hash", lambda path, *ends: (read.append(ends), whole_hash(path, *ends))[1]
    )
    saved: dict[str, files.Parts] = {}
    for number in range(3 * MAX_PARTS):
        write_lines(path, range(number, number + 1))
        saved = json.loads(json.dumps(digest(tmp_path, measure(tmp_path), saved)))
        assert is_sound(saved)
        assert len(saved["metrics.jsonl"]) <= MAX_PARTS
    ends = {end for _, end in read}
    assert sum(start not in ends for start, _ in read) <= 1 + 3, "else all is hashed over and over"
    verify_positions(tmp_path, saved)


LINE = b'{"a":1}\n'


@given(place=st.integers(0, 399), bit=st.integers(0, 7), split=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_any_committed_bit_is_found_and_a_line_that_is_no_object_is_named(
    place: int, bit: int, split: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "metrics.jsonl"
    path.write_bytes(LINE * split)
    saved = digest(folder, measure(folder), {})
    path.write_bytes(LINE * 50)
    saved = digest(folder, measure(folder), saved)
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl:\d+ must be as the run wrote it"
    ) as caught:
        verify_positions(folder, saved)
    if LINE[place % 8 : place % 8 + 1] in b'{":':  # without it, the line is no object
        assert f"jsonl:{place // 8 + 1} " in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_is_shorter_than_it_was_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, range(4))
    saved = digest(tmp_path, measure(tmp_path), {})
    path.unlink() if damage == "gone" else path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl must be at least \d+ bytes long, got "):
        verify_positions(tmp_path, saved)


@pytest.mark.parametrize(
    "saved",
    [None, [], {"a": 1}, {"a": [1]}, {"a": [[1]]}, {"a": [[1, 2]]}, {"a": [[0, ""]]}]
    + [{"a": [[5, ""], [5, ""]]}, {"a": [[True, ""]]}],
)
def test_what_no_run_saves_is_not_sound(saved: object) -> None:
    assert not is_sound(saved)
