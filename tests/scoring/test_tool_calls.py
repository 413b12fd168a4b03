"""Calls of tools as model families write them, and the values of their arguments; whatever a model
writes, nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.scoring.tool_calls import (
    MARKED,
    MAX_CALLS,
    ToolCall,
    family_of,
    find_calls,
    template_calls,
    typed,
)


def schema(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SCHEMAS = [schema("add", a="integer", b="integer"), schema("search", query="string"), schema("now")]
ADD = ToolCall("add", {"a": 1, "b": 2})


def parse_calls(text: str, family: str, schemas: list[Any], **options: bool) -> list[ToolCall]:
    return [call for _, call in find_calls(text, family, schemas, **options)]


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
        ("llama", '{"answer": 5, "name": "Bob"}', []),
        ("llama", '{"name": "Bob"}', []),
        ("llama", '{"id": 1, "name": "Bob", "type": "person"}', []),
        ("llama", '{"name": null}', []),
        ("llama", '{"name": ["now"]}', []),
        ("llama", '{"name": "Bob", "parameters": {}}', [ToolCall("Bob")]),
        ("llama", '{"type": "function", "name": "now", "parameters": {}}', [ToolCall("now")]),
        ("llama", '<|python_tag|>{"name": "now", "why": "so"}', [ToolCall("now")]),
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


LIST = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
DELETE = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
XML_NOW = "<tool_call><function=now></function></tool_call>"
XML_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
NOW = ToolCall("now")


@pytest.mark.parametrize(
    ("family", "thought", "said"),
    [
        ("hermes", DELETE, LIST),
        ("hermes", 'a call looks like <tool_call>{"name": ...}</tool_call>', LIST),
        ("hermes", "a call begins with <tool_call>", LIST),
        ("xml", XML_ADD, XML_NOW),
        ("xml", "<tool_call><function=add><parameter=a>", XML_NOW),
        ("tagged", '<add>{"a": 1, "b": 2}</add>', "<now></now>"),
        ("tagged", "<search>", "<now></now>"),
        ("llama", '{"name": "add", "parameters": {}}', '{"name": "now", "parameters": {}}'),
    ],
)
def test_what_stands_in_thinking_is_no_call(family: str, thought: str, said: str) -> None:
    end = "</think>\n\n"
    assert parse_calls(f"<think>{thought}{end}{said}", family, SCHEMAS) == [NOW]
    assert parse_calls(f"<think>{thought}{end}The answer is 4.", family, SCHEMAS) == []
    assert parse_calls(f"<think>{thought}", family, SCHEMAS) == [], "the turn ended within it"
    assert parse_calls(f"{thought}{end}{said}", family, SCHEMAS) == [NOW], "nobody began it"
    begun = parse_calls(f"{thought}{end}{said}", family, SCHEMAS, is_thinking=True)
    assert begun == [NOW], "the prompt began it"
    assert parse_calls(f"{thought} {said}", family, SCHEMAS, is_thinking=True) == []
    if family != "llama":
        again = f"<think>a{end}{said}\n<think>{thought}{end}{said}"
        assert parse_calls(again, family, SCHEMAS) == [NOW, NOW], "it thinks between two calls"
        (call,) = find_calls(f"<think>{thought}{end}So: {said}", family, SCHEMAS)
        assert call == (len(f"<think>{thought}{end}So: "), NOW)


def test_a_tool_may_be_called_think() -> None:
    think = schema("think", thought="string")
    assert parse_calls("<think>so</think>", "tagged", [think]) == [
        ToolCall("think", {"thought": "so"})
    ]


WRITE = schema("write", content="string", n="integer")
ENDS = [
    "use </tool_call> to end",
    "</function> and </parameter> too",
    "</think>",
    "<think>",
    "<tool_call>",
    "</write>",
    "</parameter> x </function>\n",
    f"so: {DELETE} it is",
]


@pytest.mark.parametrize("content", ENDS)
@pytest.mark.parametrize("family", ["hermes", "xml", "tagged", "llama"])
def test_an_argument_may_hold_the_marks_of_calls(family: str, content: str) -> None:
    arguments = {"content": content, "n": 3}
    written = {
        "hermes": f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>",
        "llama": json.dumps({"name": "write", "parameters": arguments}),
        "tagged": f"<write>{json.dumps(arguments)}</write>",
        "xml": f"<tool_call>\n<function=write>\n<parameter=content>\n{content}\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    }[family]
    expected = [ToolCall("write", arguments)]
    assert parse_calls(written, family, [WRITE]) == expected
    assert parse_calls(f"<think>\nhm\n</think>\n\n{written}", family, [WRITE]) == expected
    if family != "llama":
        assert parse_calls(f"{written}\n{written}", family, [WRITE]) == expected * 2


@pytest.mark.parametrize(
    "text",
    [
        "x</parameter></function></tool_call> more</parameter></function></tool_call>",
        "x</function></tool_call><tool_call><function=now><parameter=b>1</parameter></function>"
        "</tool_call>",
        "x</parameter> more </function></tool_call>",
    ],
)
def test_a_call_that_may_be_read_in_two_ways_is_not_run(text: str) -> None:
    whole = f"<tool_call><function=search><parameter=query>{text}"
    calls = parse_calls(whole, "xml", SCHEMAS)
    assert [bool(call.error) for call in calls] == [True]


def test_a_parameter_without_its_end_is_read_up_to_that_of_its_call() -> None:
    for end in ("</function>\n</tool_call>", "\n</tool_call>", "\n</function>", ""):
        text = f"<tool_call><function=search><parameter=query>\nq{end}"
        assert parse_calls(text, "xml", SCHEMAS) == [ToolCall("search", {"query": "q"})]


def test_blanks_without_end_are_read_in_no_time() -> None:
    blanks = " \n" * 200_000
    for text in (
        f"<tool_call><function=search><parameter=query>{blanks}x",
        f"<tool_call><function=now>{blanks}x",
        f"<tool_call>{{}}{blanks}x",
        f"<add>{{}}{blanks}x",
    ):
        for family in [*MARKED, "llama"]:
            parse_calls(text, family, SCHEMAS)


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


PIECES = (
    "<tool_call> </tool_call> <think> </think> <function=add> <parameter=a> </parameter> { } [ : , "
    '</function> "name" "add" 1 <add> </add> <|python_tag|> é \\'
)


@given(
    st.lists(st.sampled_from([*PIECES.split(), "\n"]), max_size=40).map("".join),
    st.sampled_from([*MARKED, "llama"]),
)
def test_whatever_is_written_nothing_raises_and_calls_are_plain(text: str, family: str) -> None:
    for call in parse_calls(text, family, SCHEMAS):
        assert isinstance(call.name, str)
        json.dumps(call.arguments)
        assert not (call.error and call.arguments)


INT, BOOL, NUMBER, TEXT = ({"type": kind} for kind in ("integer", "boolean", "number", "string"))
NULL = {"type": "null"}
OR_NULL = {"type": "integer", "nullable": True}  # as transformers writes `int | None`


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (BOOL, "False", False),
        (BOOL, "false", False),
        (BOOL, " TRUE\n", True),
        (BOOL, "no", "no"),
        (BOOL, "0", "0"),
        (INT, "5", 5),
        (INT, "5.0", 5),
        (INT, "five", "five"),
        (INT, "true", "true"),
        (INT, "null", "null"),
        (INT, "5.5", "5.5"),
        (NUMBER, "5", 5),
        (NUMBER, "-1.5e3", -1500.0),
        (NUMBER, "NaN", "NaN"),
        (TEXT, "5", "5"),
        (TEXT, "null", "null"),
        (TEXT, "False", "False"),
        (TEXT, " x ", " x "),
        (OR_NULL, "null", None),
        (OR_NULL, "None", None),
        (OR_NULL, "", None),
        (OR_NULL, "5", 5),
        ({"anyOf": [INT, NULL]}, "None", None),
        ({"anyOf": [TEXT, NULL]}, "123", "123"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"anyOf": [TEXT, NULL]}, "", ""),
        ({"oneOf": [BOOL, NULL]}, "False", False),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"type": ["integer", "boolean"]}, "True", True),
        ({"type": "array", "items": INT}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "['a', None, True]", ["a", None, True]),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": "array"}, "[{1, 2}]", "[{1, 2}]"),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": "object"}, "{'a': {'b': False}}", {"a": {"b": False}}),
        ({"type": "object"}, "{('a', 'b'): 1}", "{('a', 'b'): 1}"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "True", True),
        ({}, "5", 5),
        ({}, "null", None),
        ({}, "five", "five"),
        (None, "5", 5),
        (True, "5", 5),
    ],
)
def test_a_text_is_a_value_of_its_type(schema: Any, text: str, value: object) -> None:
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("family", ["xml", "tagged"])
def test_both_forms_with_plain_values_read_them_by_their_types(family: str) -> None:
    tool = {"name": "run", "parameters": {"type": "object", "properties": {"dry": BOOL}}}
    text = {
        "xml": "<tool_call><function=run><parameter=dry>False</parameter></function></tool_call>",
        "tagged": "<run>False</run>",
    }[family]
    calls = parse_calls(text, family, [{"type": "function", "function": tool}])
    assert calls == [ToolCall("run", {"dry": False})]


TYPES = ["string", "integer", "number", "boolean", "array", "object", "null", "odd"]
ANY_SCHEMA = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES))})
    | st.fixed_dictionaries({"enum": st.lists(st.none() | st.booleans() | st.integers())})
    | st.sampled_from([{}, None, 3, {"type": None}, {"anyOf": 3}, {"enum": {}}]),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
    max_leaves=4,
)


@given(ANY_SCHEMA, st.text("[]{}()'\"\\:,-+.e0123nulNoeTrFas \n", max_size=30))
def test_whatever_the_schema_and_the_text_the_value_can_be_sent(schema: Any, text: str) -> None:
    json.dumps(typed(text, schema))


def test_nesting_without_end_is_a_text() -> None:
    for text in ("[" * 100_000, "[" + "-" * 90_000 + "1]", '{"a":' * 50_000):
        assert typed(text, {"type": "array"}) == text
