"""Demonstrations: which of a row's tokens the assistant wrote, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import DataConfig
from llamarl.core.records import (
    NO_VERSION,
    PROMPT_IDS,
    RESPONSE_IDS,
    TOKEN_VERSIONS,
    Prompt,
    VersionSpan,
)
from llamarl.model.prompt_rules import make_prompt
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.prompts.demonstrations import WRITTEN, DemonstrationRules, as_row, truncate
from tests.model import chat_templates
from tests.places import CHECKPOINT

CHATS = DataConfig(prompts="x", chat=True, prompt_field="messages", completion_field=None)
PAIRS = DataConfig(prompts="x")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_templates.write_tokenizer(tmp_path_factory.mktemp("qwen"), chat_templates.QWEN)


def make_demonstration(
    number: int, row: dict[str, Any], data: DataConfig, tokenizer: Tokenizer
) -> Prompt:
    rules = DemonstrationRules(data=data, tokenizer=tokenizer)
    (found,) = rules.make_all([(number, row)], "x.jsonl")
    return found


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CHAT = turns("one", "two", "three", "four", "five")


def written(demonstration: Prompt, tokenizer: Tokenizer) -> list[str]:
    ids = demonstration.token_ids
    return [tokenizer.decode_raw(ids[start:end]) for start, end in demonstration.fields[WRITTEN]]


def test_a_plain_answer_follows_the_ids_of_its_prompt_and_ends() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    row = {"question": "What is 1+2?", "completion": "Answer: 3"}
    found = make_demonstration(7, row, PAIRS, tokenizer)
    prompt = make_prompt(row, 7, PAIRS, tokenizer).token_ids
    assert found.prompt_id == 7
    assert found.token_ids[: len(prompt)] == prompt
    assert written(found, tokenizer) == ["Answer: 3<eos>"]
    assert found.fields[WRITTEN][0][0] == len(prompt)


def test_a_demonstration_that_is_cut_keeps_its_beginning(qwen: Tokenizer) -> None:
    whole = make_demonstration(1, {"messages": turns("one", "two", "three", "four")}, CHATS, qwen)
    (first, end), (second, _) = whole.fields[WRITTEN]
    cut = truncate(whole, second + 2)
    assert cut is not None
    assert cut.token_ids == whole.token_ids[: second + 2]
    assert cut.fields[WRITTEN] == [[first, end], [second, second + 2]]
    assert truncate(whole, first) is None


@pytest.mark.parametrize(
    ("row", "data", "expected"),
    [
        ({"messages": CHAT}, CHATS, ["two<|im_end|>", "four<|im_end|>"]),
        (
            {"messages": [*CHAT[:2], {"role": "assistant", "content": "three"}]},
            CHATS,
            ["two<|im_end|>", "three<|im_end|>"],
        ),
        ({"question": "one", "completion": "42<|im_end|>"}, PAIRS, ["42<|im_end|>"]),
    ],
    ids=["each turn", "two answers in a row", "an answer that has its end"],
)
def test_every_turn_of_the_assistant_is_written_with_the_token_that_ends_it(
    qwen: Tokenizer, row: dict[str, Any], data: DataConfig, expected: list[str]
) -> None:
    found = make_demonstration(1, row, data, qwen)
    assert written(found, qwen) == expected
    if row == {"messages": CHAT}:
        whole = qwen.render_chat(CHAT[:4], is_open=False)
        assert whole.startswith(qwen.decode_raw(found.token_ids)), "what follows is left out"


def test_the_last_answer_keeps_its_thinking_whatever_follows_it(tmp_path: Path) -> None:
    thinking = chat_templates.write_tokenizer(tmp_path, chat_templates.THINKING)
    chat = turns("one", "<think>hm</think>two", "three")
    for some in (chat, chat[:2]):
        found = make_demonstration(1, {"messages": some}, CHATS, thinking)
        assert written(found, thinking) == ["<think>hm</think>two<|im_end|>"]


def test_an_answer_in_a_chat_follows_what_a_rollout_begins_with(qwen: Tokenizer) -> None:
    data = DataConfig(prompts="x", chat=True, system="Be brief.")
    row: dict[str, Any] = {"question": "one", "completion": "two"}
    prompt = make_prompt(row, 1, data, qwen).token_ids
    found = make_demonstration(1, row, data, qwen)
    assert found.token_ids[: len(prompt)] == prompt
    assert written(found, qwen) == ["two<|im_end|>"]
    row = {"question": turns("one", "two", "three"), "completion": turns("", "four")[1:]}
    assert written(make_demonstration(1, row, data, qwen), qwen) == ["four<|im_end|>"]
    plain = make_demonstration(1, row, PAIRS, qwen)
    assert written(plain, qwen) == ["four<|im_end|>"], "messages go through the template"


@settings(max_examples=40, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_a_row_trains_what_was_written_and_nothing_else(spans: list[tuple[int, int]]) -> None:
    """Each pair: tokens of context, then tokens that were written; some context at the end."""
    places, at = [], 0
    for num_context, num_written in spans:
        places.append([at + num_context, at + num_context + num_written])
        at += num_context + num_written
    ids = tuple(range(100, 100 + at + 2))
    demonstration = Prompt(prompt_id=1, text="", token_ids=ids, fields={WRITTEN: places})
    rollout, columns = as_row(demonstration, 5, 3)
    (prompt,), (response,) = columns[PROMPT_IDS], columns[RESPONSE_IDS]
    (versions,) = columns[TOKEN_VERSIONS]
    assert [*prompt, *response] == [*ids[:at]]
    trained = [i for i, version in enumerate(versions, start=len(prompt)) if version != NO_VERSION]
    assert trained == [i for start, end in places for i in range(start, end)]
    assert {*versions.tolist()} <= {3, NO_VERSION}
    assert (rollout.num_prompt_tokens, rollout.num_tokens) == (len(prompt), len(response))
    assert rollout.spans == (VersionSpan(version=3, num_tokens=len(trained)),)
    assert versions.dtype == response.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "data", "words"),
    [
        ({"question": "a"}, PAIRS, r"must have the field 'completion' \(data.completion_field\)"),
        ({"completion": "a"}, PAIRS, "must have the field 'question'"),
        ({"question": "a", "completion": ""}, PAIRS, "'completion' must be text that is not blank"),
        ({"question": ["a"], "completion": "b"}, PAIRS, "with 'role' and 'content'"),
        ({"question": "a", "completion": [{}]}, PAIRS, "with 'role' and 'content'"),
        ({"messages": turns("one")}, CHATS, "must have a turn of the assistant, got user"),
        ({"messages": []}, CHATS, "must hold at least one message"),
        ({"messages": [{"role": "user"}]}, CHATS, "with 'role' and 'content'"),
        (
            {"question": "a"},
            DataConfig(prompts="x", completion_field=None),
            "must be a list of messages with data.completion_field=null",
        ),
    ],
)
def test_what_shows_no_answer_is_refused(
    qwen: Tokenizer, row: dict[str, Any], data: DataConfig, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_demonstration(1, row, data, qwen)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (chat_templates.WITHOUT_END, "end an answer with a token that ends a completion"),
        (chat_templates.REWRITING, None),
    ],
)
def test_a_template_must_show_where_answers_are(
    tmp_path: Path, template: str, words: str | None
) -> None:
    """One that rewrites earlier answers shows what it trains."""
    tokenizer = chat_templates.write_tokenizer(tmp_path, template)
    row = {"messages": turns("one", "two", "three", "four")}
    if words is None:
        found = written(make_demonstration(1, row, CHATS, tokenizer), tokenizer)
        assert found == ["...<|im_end|>", "four<|im_end|>"]
        return
    with pytest.raises(ValueError, match=words):
        make_demonstration(1, row, CHATS, tokenizer)
