import io
from collections import Counter
from dataclasses import replace

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from llamarl.config import DataConfig
from llamarl.data.tokenizer import load_tokenizer
from llamarl.environments.prompts import PromptStream
from llamarl.types import Prompt
from tests.json_lines import write_lines
from tests.prompt_files import read_prompts
from tests.unit.tokenizer_files import write_tokenizer

ORDER_OF_SEED_17 = [7, 6, 1, 3, 5, 4, 8, 2]
ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(5)]


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
    assert [p.prompt_id for p in prompts] == [1, 2, 3, 4, 5]
    assert prompts[3].token_ids == tuple(plain.encode("What is 3?"))


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path, plain):
    jsonl = write_lines(tmp_path / "p.jsonl", ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet", row_group_size=2)
    assert read_prompts(jsonl, config(), plain) == read_prompts(
        tmp_path / "p.parquet", config(), plain
    )


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
        (b'{"prompt": "a"}', r"'question' \(data.prompt_field\), got 'prompt'"),
        (b'{"question": 7}', "'question' must be text that is not blank, got 7"),
        (b'{"question": " "}', 'must be text that is not blank, got " "'),
        (b'{"question": null}', "must be text that is not blank, got null"),
        (b'{"question": [{"role": "user", "content": "a"}]}', "unless data.chat is true"),
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


def test_prompts_that_are_too_long_can_be_left_out_which_one_line_says(tmp_path, plain, caplog):
    rows = [{"question": "a" * length} for length in (3, 60, 5, 10**6, 51)]
    path = write_lines(tmp_path / "p.jsonl", rows)
    drop = config(max_prompt_tokens=50, too_long="drop")
    prompts = read_prompts(path, drop, plain)
    assert [(p.prompt_id, len(p.text)) for p in prompts] == [(1, 3), (3, 5)]
    words = f"3 of 5 prompts in {path} have more than 50 tokens (data.max_prompt_tokens) and are"
    (record,) = caplog.records
    assert record.message == f"{words} left out (data.too_long=drop)"
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
    with pytest.raises(ValueError, match=r"data\.chat must be false .*without a chat template"):
        read_prompts(path, config(chat=True), plain)


def prompts_of(count):
    return [Prompt(prompt_id=i + 1, text=str(i), token_ids=(i,)) for i in range(count)]


def take(stream, count):
    return [next(stream) for _ in range(count)]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(-(2**70), 2**70), st.booleans(), st.integers(0, 150))
def test_a_stream_resumed_anywhere_goes_on_as_if_never_stopped(count, seed, shuffle, position):
    prompts = prompts_of(count)
    whole = take(PromptStream(prompts, seed=seed, shuffle=shuffle), position + 2 * count)
    resumed = PromptStream(prompts, seed=seed, shuffle=shuffle, position=position)
    assert take(resumed, 2 * count) == whole[position:]
    assert resumed.position == position + 2 * count


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 1000), st.booleans())
def test_every_epoch_hands_out_every_prompt_once(count, seed, shuffle):
    stream = PromptStream(prompts_of(count), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        drawn = take(stream, count)
        assert {prompt.epoch for prompt in drawn} == {epoch}
        assert Counter(p.prompt_id for p in drawn) == Counter(range(1, count + 1))


def test_order_differs_by_seed_and_epoch_and_is_the_file_order_without_shuffle():
    prompts = prompts_of(50)

    def order(seed, shuffle=True):
        stream = PromptStream(prompts, seed=seed, shuffle=shuffle)
        return [p.prompt_id for p in take(stream, 50)], [p.prompt_id for p in take(stream, 50)]

    assert order(0) == order(0)
    assert len({tuple(epoch) for seed in (0, 1, -1) for epoch in order(seed)}) == 6
    assert order(3, shuffle=False) == ([*range(1, 51)],) * 2


def test_the_order_never_changes_between_releases():
    stream = PromptStream(prompts_of(8), seed=17, shuffle=True)
    assert [p.prompt_id for p in take(stream, 8)] == ORDER_OF_SEED_17


def test_a_stream_does_not_change_the_prompts_it_was_given():
    prompts = prompts_of(3)
    copies = [replace(prompt) for prompt in prompts]
    take(PromptStream(prompts, seed=0, shuffle=True), 9)
    assert prompts == copies
