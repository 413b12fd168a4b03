"""The conversations and tools of data rows, in the form in which chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamarl.core.files import parse

NumberedRow = tuple[int, dict[str, Any]]
"""A data row and its number, from 1: the line of a .jsonl file, or the place of any other row."""


def shorten_value(value: object) -> str:
    """Return the value as JSON, at most 60 characters of it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


Schema = Mapping[str, Any]
"""The schema of a tool that the assistant may call: {"type": "function", "function": {"name": ...,
...}}."""

TOOLS = "tools"  # the field of a row, as TRL and verl name it


def read_messages(value: object, field: str) -> list[dict[str, Any]]:
    """Return the messages that `field` holds. Raises ValueError for anything else, and for an empty
    list."""
    must = f"{field!r} must be text or a list of messages with 'role' and 'content'"
    if not isinstance(value, list):
        raise ValueError(f"{must}, got {shorten_value(value)}")
    if not value:
        raise ValueError(f"{field!r} must hold at least one message, got an empty list")
    return [_message(each, must, field) for each in value]


def read_tools(row: Mapping[str, Any]) -> list[Schema]:
    """Return the schemas in a row's field for them, a list or JSON of one; none without it. Raises
    ValueError for anything else."""
    given = row.get(TOOLS) or []
    tools = _parsed(given) if isinstance(given, str) else given
    if not isinstance(tools, list) or not all(map(_is_schema, tools)):
        must = f"{TOOLS!r} must be a list of functions with names, or JSON of one"
        raise ValueError(f"{must}, got {shorten_value(row[TOOLS])}")
    return tools


def _message(value: object, must: str, field: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ValueError(f"{must}, got {shorten_value(value)} in the list")
    calls = value.get("tool_calls") or []
    content = value.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(_text_of_part(each, field) for each in content)
    if not isinstance(content, str):
        raise ValueError(f"{must}, got {shorten_value(value)} in the list")
    found = {key: each for key, each in value.items() if key != "tool_calls"} | {"content": content}
    return found | {"tool_calls": [_call(each) for each in calls]} if calls else found


def _text_of_part(part: object, field: str) -> str:
    """Return the text of a part of a message's content."""
    match part:
        case str():
            return part
        case {"text": str() as text, **others} if others.get("type", "text") == "text":
            return text
    raise ValueError(f"{field!r} must hold text alone, got a part {shorten_value(part)}")


def _call(call: object) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write as JSON themselves."""
    must = "a tool call must be a function with a name and arguments that are an object"
    others: dict[str, Any] = {"type": "function"}
    function: object = call  # as some templates take it
    if isinstance(call, dict) and "function" in call:
        others |= {key: each for key, each in call.items() if key != "function"}
        function = call["function"]
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if isinstance(arguments, dict):
            return others | {"function": function | {"arguments": arguments}}
    raise ValueError(f"{must}, got {shorten_value(call)}")


def _is_schema(tool: object) -> bool:
    match tool:
        case {"function": {"name": str()}} | {"name": str()}:
            return True
    return False


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return parse(text)
    except ValueError:
        return None
