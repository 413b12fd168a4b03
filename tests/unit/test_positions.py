"""Positions: a checkpoint stands for whole lines, which a resumed run finds as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core import files
from llamarl.core.files import MAX_PARTS, cut, digest, is_sound, measure, verify_positions


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


def test_only_what_came_since_the_last_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
