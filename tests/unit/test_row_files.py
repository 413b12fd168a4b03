"""Files of rows: Arrow in both forms, and folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

from llamarl.prompts import files
from llamarl.prompts.files import cut_files, find_files, read_rows
from tests.json_lines import write_lines

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(7)]
Writer = Callable[[pyarrow.OSFile, pyarrow.Schema], ipc.RecordBatchStreamWriter]


def write_arrow(path: Path, rows: list[dict[str, str]], write: Writer) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, write(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("write", [ipc.new_stream, ipc.new_file])
def test_arrow_is_read_as_a_stream_and_as_a_file(tmp_path: Path, write: Writer) -> None:
    path = write_arrow(tmp_path / "rows.arrow", ROWS, write)
    assert list(read_rows(path)) == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"\xff\xff\xff\xff\x10", b"abc"])
def test_a_damaged_arrow_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.arrow"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.arrow must be a readable Arrow file") as caught:
        list(read_rows(path))
    assert len(str(caught.value).splitlines()) == 1


def test_an_arrow_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "rows.arrow", ROWS, ipc.new_stream)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"rows\.arrow must be a readable Arrow file"):
        list(read_rows(path))


def test_a_folder_is_its_files_one_after_the_other(tmp_path: Path) -> None:
    write_arrow(tmp_path / "2.arrow", ROWS[4:], ipc.new_stream)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:4]), tmp_path / "1.parquet")
    write_lines(tmp_path / "0.jsonl", ROWS[:2])
    (tmp_path / "LICENSE").write_text("")
    assert list(read_rows(tmp_path)) == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize("write", [ipc.new_stream, ipc.new_file])
@pytest.mark.parametrize("piece_rows", [1, 2, 3, 7])
def test_pieces_of_a_folder_give_its_rows(
    tmp_path: Path, write: Writer, piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "0.jsonl", ROWS[:2])
    write_arrow(tmp_path / "1.arrow", ROWS[2:], write)
    monkeypatch.setattr(files, "PIECE_ROWS", piece_rows)
    pieces = cut_files(find_files(tmp_path))
    assert len(pieces) == 1 + -(-5 // piece_rows)
    found = [(piece.before + number, row) for piece in pieces for number, row in piece.rows()]
    assert found == list(enumerate(ROWS, start=1))


def test_a_folder_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold \.jsonl, \.parquet, \.arrow files, got"):
        list(read_rows(tmp_path))
