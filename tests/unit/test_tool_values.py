"""What a model writes as plain text becomes a value of its parameter's type, or stays a text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.scoring.tool_calls import ToolCall, parse_calls, typed

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
SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES))})
    | st.fixed_dictionaries({"enum": st.lists(st.none() | st.booleans() | st.integers())})
    | st.sampled_from([{}, None, 3, {"type": None}, {"anyOf": 3}, {"enum": {}}]),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
    max_leaves=4,
)


@given(SCHEMAS, st.text("[]{}()'\"\\:,-+.e0123nulNoeTrFas \n", max_size=30))
def test_whatever_the_schema_and_the_text_the_value_can_be_sent(schema: Any, text: str) -> None:
    json.dumps(typed(text, schema))


def test_nesting_without_end_is_a_text() -> None:
    for text in ("[" * 100_000, "[" + "-" * 90_000 + "1]", '{"a":' * 50_000):
        assert typed(text, {"type": "array"}) == text
