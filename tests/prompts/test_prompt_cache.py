"""Large files of prompts: what several processes make of pieces is what one makes of the whole."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from llamarl.core.config import DataConfig, RewardConfig
from llamarl.core.records import SOURCE_ROWS, Prompt
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.prompts import cache, files
from llamarl.prompts.cache import read_source
from llamarl.prompts.demonstrations import DemonstrationRules
from llamarl.prompts.files import cut_files, read_rows
from llamarl.prompts.rows import PromptTable, rows_in_memory
from tests.json_lines import write_lines
from tests.model.tokenizer_files import write_tokenizer
from tests.prompt_files import source_of

pytestmark = pytest.mark.full

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(300)]
DATA = DataConfig(prompts="x.jsonl", max_prompt_tokens=12, overlong="drop")  # drops from 100 on


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture
def small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files count as large; the folder of the cache."""
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)
    monkeypatch.setattr(files, "PIECE_BYTES", 2000)
    monkeypatch.setattr(files, "PIECE_ROWS", 60)
    monkeypatch.setattr(files, "BLOCK_BYTES", 500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llamarl" / "prompts"


@given(
    st.lists(st.sampled_from([b"{}", b"", b'{"a": "bcd"}', b" "]), max_size=60),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 12),
)
def test_pieces_of_lines_give_the_rows_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    has_end: bool,
    piece_bytes: int,
    block_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "p.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * has_end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", piece_bytes)
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        pieces = cut_files([path])
    assert [row for piece in pieces for row in piece.rows()] == [*read_rows(path)]


@given(st.integers(0, 40), st.integers(1, 15), st.integers(1, 15))
def test_pieces_of_a_parquet_file_give_its_rows(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, group_rows: int, piece_rows: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "p.parquet"
    table = pyarrow.table({"number": pyarrow.array(range(num_rows), pyarrow.int64())})
    parquet.write_table(table, path, row_group_size=group_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_ROWS", piece_rows)
        pieces = cut_files([path])
    expected = [(i + 1, {"number": i}) for i in range(num_rows)]
    assert [row for piece in pieces for row in piece.rows()] == expected
    assert [*read_rows(path)] == expected


def test_processes_make_of_pieces_what_one_makes_of_the_whole_and_later_runs_find_it(
    tmp_path: Path,
    small_pieces: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_lines(tmp_path / "p.jsonl", ROWS)
    shown: list[tuple[str, int, int]] = []
    source = source_of(path, DATA, tokenizer)
    table = PromptTable([read_source(source, show=lambda *each: shown.append(each))])
    assert shown[-1][1] == shown[-1][2] == len(cut_files([path])) > 3
    found = [*table]
    monkeypatch.setattr(cache, "LEAST_BYTES", 10**9)
    whole = [*PromptTable([read_source(source)])]
    assert found == whole
    assert [prompt.fields for prompt in found] == ROWS[:100]
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)
    caplog.clear()
    (folder,) = small_pieces.iterdir()
    times = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    again = PromptTable([read_source(source, show=lambda *each: pytest.fail("it is made again"))])
    assert [*again] == found
    assert again.digest == table.digest
    assert times == {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert "200 of 300 prompts in" in caplog.text, "each start says so"


@pytest.mark.long
def test_a_file_or_setting_that_has_changed_or_a_damaged_folder_is_tokenised_again(
    tmp_path: Path, small_pieces: Path, tokenizer: Tokenizer
) -> None:
    path = write_lines(tmp_path / "p.jsonl", ROWS[:50])

    def read(**fields: Any) -> list[Prompt]:
        data = DataConfig(prompts="x.jsonl", **fields)
        return [*PromptTable([read_source(source_of(path, data, tokenizer))])]

    first = read()
    assert read(shuffle=False, weights=[2.0]) == first
    assert len([*small_pieces.iterdir()]) == 1, "the order is not in the files"
    assert [p.text for p in read(prompt_field="answer")] == [row["answer"] for row in ROWS[:50]]
    assert len([*small_pieces.iterdir()]) == 2
    write_lines(path, ROWS[1:50])
    assert [p.text for p in read()] == [p.text for p in first[1:]]
    assert len([*small_pieces.iterdir()]) == 3
    for folder in small_pieces.iterdir():
        with (folder / "rows").open("ab") as file:
            file.write(b"more")
    assert [p.text for p in read()] == [p.text for p in first[1:]]


@pytest.mark.parametrize("overlong", ["drop", pytest.param("truncate", marks=pytest.mark.long)])
def test_demonstrations_of_large_files_are_those_of_each_row_by_itself(
    overlong: str, tmp_path: Path, small_pieces: Path, tokenizer: Tokenizer, caplog
) -> None:
    drawn = random.Random(overlong)
    rows = [
        {"question": "a" * drawn.randint(1, 9), "completion": "b" * drawn.randint(1, 9)}
        for _ in range(200)
    ]
    path = write_lines(tmp_path / "p.jsonl", rows)
    data = DataConfig(prompts="x.jsonl", max_prompt_tokens=11, overlong=overlong)
    found = [*PromptTable([read_source(source_of(path, data, tokenizer, has_answers=True))])]
    expected = []
    for number, row in enumerate(rows, start=1):
        rules = DemonstrationRules(data=data, tokenizer=tokenizer)
        expected += rules.make_all([(number, row)], path)
    assert found == expected
    whole = sum(len(row["question"] + row["completion"]) + 2 <= 11 for row in rows)
    assert 0 < whole < len(rows), "one token per letter, the beginning and the end"
    assert len(found) == (whole if overlong == "drop" else len(rows))
    num_long = len(rows) - whole
    assert f"{num_long} of 200 demonstrations in {path} have more than 11 tokens" in caplog.text


def test_a_bad_row_of_a_large_file_is_named_with_its_line(
    tmp_path: Path, small_pieces: Path, tokenizer: Tokenizer
) -> None:
    rows = [*ROWS[:250], {"answer": "1"}, *ROWS[250:], {"answer": "2"}]
    path = write_lines(tmp_path / "p.jsonl", rows)
    words = r"p\.jsonl:251: the row must have the field 'question' .*, got 'answer'$"
    with pytest.raises(ValueError, match=words) as caught:
        read_source(source_of(path, DATA, tokenizer))
    assert "\n" not in str(caught.value)
    assert not [*small_pieces.iterdir()], "nothing is left"


@pytest.mark.long
def test_what_rewards_need_is_checked_in_large_files_too(
    tmp_path: Path, small_pieces: Path, tokenizer: Tokenizer
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [*ROWS[:90], {"question": "a"}])
    exact = RewardConfig(functions=["exact"])
    with pytest.raises(ValueError, match=r"p\.jsonl:91: the row must have the field 'answer'"):
        read_source(source_of(path, DATA, tokenizer, reward=exact))


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, small_pieces: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "p.jsonl", ROWS)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"the cache .* must be a folder with room to write"):
        read_source(source_of(path, DATA, tokenizer))


def test_a_table_gives_each_prompt_by_its_place_and_closes_its_files() -> None:
    def prompts(count: int) -> list[Prompt]:
        return [
            Prompt(prompt_id=2 * i + 1, text=f"é{i}", token_ids=(i,) * i, fields={"a": [i, None]})
            for i in range(count)
        ]

    before = len(os.listdir("/proc/self/fd"))
    table = PromptTable([rows_in_memory(prompts(n)) for n in (3, 0, 40)])
    assert (len(table), table.longest, table.num_tokens) == (43, 39, 3 + 780)
    expected = prompts(3) + prompts(40)
    ids = [1, 3, 5, *(2 * SOURCE_ROWS + 2 * i + 1 for i in range(40))]
    order = random.Random(0).sample(range(43), 43)
    for place in order:
        found = table[place]
        assert (found.prompt_id, found.source) == (ids[place], 0 if place < 3 else 2)
        assert (found.text, found.fields) == (expected[place].text, expected[place].fields)
        assert found.token_ids == expected[place].token_ids
    assert [*table] == table[:] == [table[place - 43] for place in range(43)]
    with pytest.raises(IndexError):
        table[43]
    assert table.digest != PromptTable([rows_in_memory(prompts(n)) for n in (4, 40)]).digest
    del table, found
    assert len(os.listdir("/proc/self/fd")) == before
