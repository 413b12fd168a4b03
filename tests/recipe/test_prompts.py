"""Rows of files in every form, and the prompts that they become."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

from llamarl.core.config import DataConfig, RewardConfig
from llamarl.core.records import filled, value_at
from llamarl.model.tokenizer import load_tokenizer
from llamarl.prompts import files
from llamarl.prompts.files import cut_files, find_files, read_rows
from llamarl.scoring.reward_functions import expected_answer
from tests.json_lines import write_lines
from tests.model.tokenizer_files import write_tokenizer
from tests.prompt_files import read_prompts

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(7)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chat"), chat=True))


def config(**fields):
    return DataConfig(prompts="x.jsonl", **fields)


def test_a_plain_prompt_is_its_text_with_the_row_beside_it(tmp_path, plain):
    prompts = read_prompts(write_lines(tmp_path / "p.jsonl", ROWS), config(), plain)
    assert [p.text for p in prompts] == [row["question"] for row in ROWS]
    assert [p.fields for p in prompts] == ROWS
    assert [p.prompt_id for p in prompts] == [*range(1, 8)]
    assert prompts[3].token_ids == tuple(plain.encode("What is 3?"))


def test_a_chat_prompt_is_rendered_with_system_message_and_one_bos(tmp_path, chat):
    path = write_lines(tmp_path / "p.jsonl", [{"question": "Hi"}])
    (prompt,) = read_prompts(path, config(chat=True, system="Be brief."), chat)
    assert prompt.text == "<bos><system>Be brief.\n<user>Hi\n<assistant>"
    assert prompt.token_ids.count(0) == 1
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    path = write_lines(tmp_path / "p.jsonl", [{"question": [*turns, turns[0]]}])
    (prompt,) = read_prompts(path, config(chat=True), chat)
    assert prompt.text == "<bos><user>Hi\n<assistant>Yes?\n<user>Hi\n<assistant>"


def test_blank_lines_and_a_byte_order_mark_do_not_matter_and_keep_line_numbers(tmp_path, plain):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a"}\n\n  \n{"question": "b"}')
    prompts = read_prompts(path, config(), plain)
    assert [(p.prompt_id, p.text) for p in prompts] == [(1, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a"', "must be a JSON object, got a mistake at column 17: Expecting"),
        (b'{"question": "\xff"}', "byte 0xff at column 15, which is not UTF-8"),
        (b'{"a": ' + b"[" * 10**5, "a JSON object, got lists or objects nested too deep"),
        (b'{"a": ' + b"7" * 6000 + b"}", "a JSON object, got a number of too many digits"),
        (rb'{"question": "\uD800"}', r"got '\\ud800', half of a character"),
        (b'["a"]', r'must be a JSON object, got \["a"\]'),
        (b'{"text": "a"}', r"'question' \(data.prompt_field\), got 'text'"),
        (b'{"question": 7}', "'question' must be text that is not blank, got 7"),
        (b'{"question": " "}', 'must be text that is not blank, got " "'),
        (b'{"question": null}', "must be text that is not blank, got null"),
        (b'{"question": [{"role": "user", "content": "a"}]}', "must be text for a tokenizer"),
        (b'{"question": "' + b"a" * 50 + b'"}', r"at most 50 tokens .*got 51"),
    ],
)
def test_a_bad_line_is_refused_in_one_line_with_file_and_number(tmp_path, plain, line, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"question": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path, config(max_prompt_tokens=50), plain)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


def test_prompts_that_are_overlong_can_be_left_out_which_one_line_says(tmp_path, plain, caplog):
    rows = [{"question": "a" * length} for length in (3, 60, 5, 10**6, 51)]
    path = write_lines(tmp_path / "p.jsonl", rows)
    drop = config(max_prompt_tokens=50, overlong="drop")
    prompts = read_prompts(path, drop, plain)
    assert [(p.prompt_id, len(p.text)) for p in prompts] == [(1, 3), (3, 5)]
    words = f"3 of 5 prompts in {path} have more than 50 tokens (data.max_prompt_tokens) and are"
    (record,) = caplog.records
    assert record.message == f"{words} left out (data.overlong=drop)"
    assert [p.prompt_id for p in read_prompts(path, drop, plain, most=2)] == [1, 3]
    write_lines(path, rows[1:2])
    words = r"p\.jsonl must hold at least one prompt of at most 50 tokens \(data.*\), got none"
    with pytest.raises(ValueError, match=words):
        read_prompts(path, drop, plain)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ([], "at least one message"),
        (["hi"], "'role' and 'content', got \"hi\""),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"role": "tool", "content": "x"}], "must suit the chat template .* no tools here"),
        ([{"role": "system", "content": "x"}], r"data\.system is set"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused_with_their_line(tmp_path, chat, question, message):
    path = write_lines(tmp_path / "p.jsonl", [{"question": "a"}, {"question": question}])
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*{message}"):
        read_prompts(path, config(chat=True, system="s"), chat)


def damaged_page():
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS * 100), table)
    content = bytearray(table.getvalue())
    content[10:60] = b"\xff" * 50
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "must exist"),
        ("folder.jsonl", ..., "a folder of prompts must hold"),
        ("none.csv", None, r"must end in \.jsonl, \.parquet or \.arrow"),
        ("empty.jsonl", b"\n", "at least one prompt, got none"),
        ("bad.parquet", b"\n", "must be a readable Parquet file"),
        ("page.parquet", damaged_page(), r"page\.parquet must be a readable Parquet file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_missing_empty_or_damaged_is_named(tmp_path, plain, name, content, words):
    path = tmp_path / name
    if content is ...:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        read_prompts(path, config(), plain)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_chat_recipe_without_a_chat_template_is_refused(tmp_path, plain):
    path = write_lines(tmp_path / "p.jsonl", ROWS)
    with pytest.raises(
        ValueError, match=r"data\.chat must be false .*without a chat template .*_template"
    ):
        read_prompts(path, config(chat=True), plain)


MESSAGES = [{"role": "user", "content": "What is 1+1?"}]
OF_VERL = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "question": "another", "answer": "3"},
}


def test_files_of_verl_are_read_as_they_are(tmp_path, chat):
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([OF_VERL] * 3), path)
    exact = RewardConfig(functions=["exact"])
    prompts = read_prompts(path, config(), chat, reward=exact)
    assert [prompt.text for prompt in prompts] == ["<bos><user>What is 1+1?\n<assistant>"] * 3
    assert prompts[1].question("question") == "What is 1+1?"
    assert expected_answer(prompts[2], exact) == "2"


def test_prompts_of_trl_are_text_or_messages_in_one_file(tmp_path, chat):
    rows = [{"prompt": "Say 1"}, {"prompt": MESSAGES}]
    first, second = read_prompts(write_lines(tmp_path / "p.jsonl", rows), config(), chat)
    assert first.text == "Say 1"
    assert second.text == "<bos><user>What is 1+1?\n<assistant>"
    assert [first.token_ids.count(0), second.token_ids.count(0)] == [1, 1], "one BOS each"
    first, _ = read_prompts(tmp_path / "p.jsonl", config(chat=True), chat)
    assert first.text == "<bos><user>Say 1\n<assistant>"


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ({"a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a": {"b": 1}, "a.b": 2}, "a.b", 2),
        ({"question": 1, "prompt": 2}, "question", 1),
        ({"prompt": 2}, "question", 2),
        ({"answer": None, "reward_model": {"ground_truth": 3}}, "answer", None),
        ({"reward_model": {"ground_truth": 3}}, "answer", 3),
        ({"a": {"b": 1}}, "a.c", KeyError),
        ({"a": "text"}, "a.b", KeyError),
        ({"a": [{"b": 1}]}, "a.b", KeyError),
        ({"reward_model": {"style": "rule"}}, "answer", KeyError),
    ],
)
def test_a_name_of_a_field_may_lead_into_objects(row, field, value):
    if value is KeyError:
        with pytest.raises(KeyError):
            value_at(row, field)
    else:
        assert value_at(row, field) == value


def test_a_nested_field_that_a_row_lacks_is_named_with_its_line(tmp_path, plain):
    rows = [{"a": {"q": "x"}, "r": {"gold": "1"}}, {"a": {"q": "y"}, "r": {}}, {"a": {}}]
    path = write_lines(tmp_path / "p.jsonl", rows)
    exact = RewardConfig(functions=["exact"], answer_field="r.gold")
    with pytest.raises(ValueError, match=r"p\.jsonl:3: .*'a\.q' \(data\.prompt_field\), got 'a'$"):
        read_prompts(path, config(prompt_field="a.q"), plain)
    must = r"p\.jsonl:2: .*'r\.gold' \(reward\.answer_field\), got 'a', 'r'$"
    with pytest.raises(ValueError, match=must):
        read_prompts(path, config(prompt_field="a.q"), plain, reward=exact)


def test_prompts_that_are_too_long_can_be_cut_to_their_end(tmp_path, plain, chat, caplog):
    rows = [{"question": "abcdefghij"}, {"question": "abc"}, {"question": "x" * 10**6 + "yz"}]
    path = write_lines(tmp_path / "p.jsonl", rows)
    cut = config(max_prompt_tokens=5, overlong="truncate")
    prompts = read_prompts(path, cut, plain)
    assert [prompt.text for prompt in prompts] == ["fghij", "abc", "xxxyz"]
    assert [len(prompt.token_ids) for prompt in prompts] == [5, 4, 5]
    words = f"2 of 3 prompts in {path} have more than 5 tokens (data.max_prompt_tokens) and are cut"
    assert caplog.messages == [f"{words} (data.overlong=truncate)"]
    (prompt, *_) = read_prompts(path, replace(cut, chat=True, max_prompt_tokens=12), chat)
    assert prompt.text == "j\n<assistant>"[-12:], "the end of the template stays"


def test_a_chat_template_gets_the_arguments_of_the_recipe(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", chat=True)
    path = folder / "chat_template.jinja"
    path.write_text(
        path.read_text() + "{% if not enable_thinking | default(true) %}<done>{% endif %}"
    )
    data = write_lines(tmp_path / "p.jsonl", [{"question": "a"}])
    texts = []
    for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        own = config(chat=True, chat_template_kwargs=kwargs)
        (prompt,) = read_prompts(data, own, load_tokenizer(folder, kwargs))
        texts.append(prompt.text)
    assert texts[0] == texts[1] != texts[2]
    assert texts[2] == f"{texts[0]}<done>"
    with pytest.raises(ValueError, match="chat_template_kwargs must leave out"):
        config(chat_template_kwargs={"tools": []})


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
    must = r"must hold \.jsonl, \.parquet, \.arrow files, or folders of tasks"
    with pytest.raises(ValueError, match=must):
        list(read_rows(tmp_path))


def test_a_template_is_filled_with_fields_of_a_row() -> None:
    row = {"question": "a {n}", "n": 3, "of": {"it": [1]}}
    assert filled("{question} {n:>2}{{}} {of.it}", row, "k") == "a {n}  3{} [1]"
    for wrong in ("{answer}", "{", "{question.x}", "{}", "{question.__class__}"):
        with pytest.raises(ValueError, match=r"^k must name fields of the prompt's row in braces"):
            filled(wrong, row, "k")
