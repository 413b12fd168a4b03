"""Calls of tools as model families write them; whatever a model writes, nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.environments.tool_calls import (
    FAMILIES,
    MAX_CALLS,
    ToolCall,
    family_of,
    parse_calls,
    template_calls,
)


def schema(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SCHEMAS = [schema("add", a="integer", b="integer"), schema("search", query="string"), schema("now")]
ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            [ADD],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', [ToolCall("now")]),
        ("hermes", "3 < 4, no call", []),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("llama", '<|python_tag|>{"name": "now", "parameters": {}}', [ToolCall("now")]),
        ("llama", '{"name": "now", "parameters": {}}; {"name": "now"}', [ToolCall("now")] * 2),
        ("llama", 'It is {"name": "now"}', []),
        ("llama", '{"a": 1}', []),
        (
            "xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            [ADD],
        ),
        (
            "xml",
            "<tool_call><function=search><parameter=query>1</parameter></function></tool_call>",
            [ToolCall("search", {"query": "1"})],
        ),
        ("tagged", "<search>4 is?</search>", [ToolCall("search", {"query": "4 is?"})]),
        ("tagged", '<search>{"query": "x"}</search>', [ToolCall("search", {"query": "x"})]),
        ("tagged", '<add>{"a": 1, "b": 2}</add> and <now></now>', [ADD, ToolCall("now")]),
        ("tagged", "<search>without an end", [ToolCall("search", {"query": "without an end"})]),
        ("tagged", "<other>1</other>", []),
    ],
)
def test_each_family_reads_its_own_form(family: str, text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, family, SCHEMAS) == calls


@pytest.mark.parametrize(
    ("family", "text", "name", "words"),
    [
        ("hermes", "<tool_call>add(1, 2)</tool_call>", "", "must be JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "", "an object with a name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>', "add", "an object"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "", "must be JSON"),
        ("xml", "<tool_call>add</tool_call>", "", "<function=NAME>"),
        ("tagged", "<add>1, 2</add>", "add", "a JSON object"),
    ],
)
def test_a_call_that_does_not_parse_says_why(family: str, text: str, name: str, words: str) -> None:
    (call,) = parse_calls(text, family, SCHEMAS)
    assert call.name == name
    assert words in call.error


def test_a_model_that_repeats_itself_makes_no_more_calls_than_the_most() -> None:
    for family, text in (
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("llama", '{"name": "now"};'),
        ("tagged", "<now></now>"),
    ):
        assert len(parse_calls(text * 1000, family, SCHEMAS)) == MAX_CALLS


def test_a_message_of_the_tokenizers_own_template_has_calls() -> None:
    whole = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now"}}]}
    assert template_calls(whole) == [ToolCall("now")]
    assert template_calls({"content": "no"}) == []


def test_the_template_shows_its_family() -> None:
    assert family_of("...<tool_call>...", None) == "hermes"
    assert family_of("<tool_call><function=", None) == "xml"
    assert family_of("<|python_tag|>", None) == "llama"
    assert family_of("{{ message.content }}", None) is None
    assert family_of("<tool_call>", {"x": 1}) == "template"


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "{", "}"]
    + ['"name"', '"add"', ":", ",", "[", "1", "<add>", "</add>", "<|python_tag|>", "é", "\\", "\n"]
)


@given(st.lists(PIECES, max_size=40).map("".join), st.sampled_from(FAMILIES[:4]))
def test_whatever_is_written_nothing_raises_and_calls_are_plain(text: str, family: str) -> None:
    for call in parse_calls(text, family, SCHEMAS):
        assert isinstance(call.name, str)
        json.dumps(call.arguments)
        assert not (call.error and call.arguments)
