"""Writes calls of tools as models write them: the inverse of `scoring/tool_calls.py`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from llamarl.model.tokenizer import ASSISTANT, Tokenizer
from llamarl.scoring.tool_calls import CALL, END_OF_CALL, ToolCall
from llamarl.scoring.turn_format import USER, TurnFormat

Schema = Mapping[str, Any]
NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")
FORMULA = re.compile(r"\d[\d\s.]*(?:[-+*/^%x][\s\d.()]*\d)+")
NO_SUCH_TOOL = "no_such_tool"
OTHERS = {"string": [1, 2], "integer": "many", "number": "many", "boolean": "perhaps"}
"""For each type of a JSON schema a value of another one."""


def write_call(form: TurnFormat, tokenizer: Tokenizer, name: str, arguments: Schema) -> str:
    """Return the text of a call as the chat template writes it, so that a rendering of it has the
    same ids, if `form` reads it so; else in the form that `form` reads."""
    with suppress(ValueError):
        text = _rendered(form, tokenizer, name, arguments)
        if [*form.read(tokenizer.encode(text, special=False)).calls] == [ToolCall(name, arguments)]:
            return text
    match form.family:
        case "hermes":
            body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            return f"{CALL}\n{body}\n{END_OF_CALL}"
        case "xml":
            parts = "".join(
                f"<parameter={key}>\n{_plain(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            return f"{CALL}\n<function={name}>\n{parts}</function>\n{END_OF_CALL}"
        case "tagged":
            is_bare = len(arguments) == 1 and len(_properties(form, name)) == 1
            value = _plain(next(iter(arguments.values()))) if is_bare else json.dumps(arguments)
            return f"<{name}>{value}</{name}>"
        case "llama":
            return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        case _:
            return _rendered(form, tokenizer, name, arguments)


def write_broken_call(form: TurnFormat, name: str) -> str:
    """Return the text of a call that breaks off in the middle of its arguments."""
    match form.family:
        case "xml":
            return f"{CALL}\n<function={name}\n{END_OF_CALL}"
        case "tagged":
            return f'<{name}>{{"a": 1, </{name}>'
        case "llama":
            return f'{{"name": "{name}", "parameters": {{"a": '
        case _:
            return f'{CALL}\n{{"name": "{name}", "arguments": {{"a": \n{END_OF_CALL}'


def make_arguments(tool: Schema, question: str, rng: random.Random) -> dict[str, Any]:
    """Return arguments of the types that the tool's schema asks for, made of what the question
    says where that fits."""
    parameters = tool["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = parameters.get("required", [*properties])
    names = [name for name in properties if name in required or rng.random() < 0.5]
    return {name: _value(properties[name], question, rng) for name in names}


def make_wrong_arguments(tool: Schema, question: str, rng: random.Random) -> dict[str, Any]:
    """Return arguments of which one has a wrong type, or is missing."""
    found = make_arguments(tool, question, rng)
    if not found:
        return {"surplus": 1}
    name = rng.choice([*found])
    kind = tool["function"]["parameters"]["properties"][name].get("type")
    if rng.random() < 0.5 or not isinstance(kind, str) or kind not in OTHERS:
        del found[name]
    else:
        found[name] = OTHERS[kind]
    return found


def _value(schema: Schema, question: str, rng: random.Random) -> Any:
    """Return a value of this JSON schema."""
    if choices := schema.get("enum"):
        return rng.choice(choices)
    if "default" in schema and rng.random() < 0.5:
        return schema["default"]
    numbers = NUMBERS.findall(question) or ["1"]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), None)
    match kind:
        case "integer":
            return int(float(rng.choice(numbers)))
        case "number":
            return float(rng.choice(numbers))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items") or {}, question, rng)]
        case "object":
            inner = schema.get("properties") or {}
            return {name: _value(each, question, rng) for name, each in inner.items()}
    formula = FORMULA.search(question)
    return formula[0].strip() if formula else question[:200]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _properties(form: TurnFormat, name: str) -> Schema:
    for tool in form.kind.schemas:
        if tool["function"]["name"] == name:
            return (tool["function"].get("parameters") or {}).get("properties") or {}
    return {}


def _rendered(form: TurnFormat, tokenizer: Tokenizer, name: str, arguments: Schema) -> str:
    """Return the call as the chat template writes it in a turn of the model."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    turn = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
    before = tokenizer.render_chat([USER], form.kind.schemas)
    whole = tokenizer.render_chat([USER, turn], form.kind.schemas, is_open=False)
    text = whole.removeprefix(before)
    for token, number in tokenizer.special_ids.items():
        if number in tokenizer.eos_token_ids:
            text = text.partition(token)[0]
    return text
