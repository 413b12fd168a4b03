"""How models write calls of tools, by family, and reading them.

Owns: these forms, and what is wrong with a call. Does not own: tokens (`turn_format.py`), or
running a call. Invariant: whatever a model writes is calls, calls that say what is wrong with them,
or no call at all; nothing raises.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
    llama     {"name": "add", "parameters": {"a": 1, "b": 2}}
    xml       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    tagged    <add>{"a": 1, "b": 2}</add>, or of a tool with one parameter <search>text</search>
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.environments.definition import Schema

MAX_CALLS = 64  # of one turn; a model that repeats itself would write thousands
TOOL_CALL_MARK = "<tool_call>"
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
FAMILIES = ("hermes", "llama", "xml", "tagged", "template")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `error` says why it cannot be run."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def family_of(template: str, response_template: object) -> str | None:
    """The family of a checkpoint with this chat template; None if it shows no form of calls."""
    if response_template is not None:
        return "template"
    if "<tool_call>" in template:
        return "xml" if "<function=" in template else "hermes"
    is_llama = PYTHON_TAG in template or ('"parameters": ' in template and "ipython" in template)
    return "llama" if is_llama else None


def parse_calls(text: str, family: str, schemas: Sequence[Schema]) -> list[ToolCall]:
    """The calls in what a model wrote in one turn, special tokens included; at most MAX_CALLS."""
    tools = {schema["function"]["name"]: schema["function"] for schema in schemas}
    if family == "hermes":
        calls = [_json_call(body) for body in TOOL_CALL.findall(text)]
    elif family == "xml":
        calls = [_xml_call(body, tools) for body in TOOL_CALL.findall(text)]
    elif family == "llama":
        calls = _llama_calls(text)
    else:
        calls = _tagged_calls(text, tools)
    return calls[:MAX_CALLS]


def text_before(text: str, family: str, schemas: Sequence[Schema]) -> str:
    """What a turn with calls says before the first of them."""
    if family == "llama":
        return ""
    marks = [f"<{schema['function']['name']}>" for schema in schemas]
    places = [text.find(mark) for mark in (marks if family == "tagged" else [TOOL_CALL_MARK])]
    return text[: min((place for place in places if place >= 0), default=None)].rstrip()


def template_calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """Those of a message that the tokenizer's own response template found."""
    found = message.get("tool_calls")
    return [_checked(call.get("function", call)) for call in found or ()][:MAX_CALLS]


def _checked(value: object) -> ToolCall:
    """A call from {"name": ..., "arguments" or "parameters": {...}}."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return ToolCall("", error="a call must be an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments of a call must be an object")
    return ToolCall(name, arguments)


def _json(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_call(body: str) -> ToolCall:
    value = _json(body.strip())
    return ToolCall("", error="a call must be JSON") if value is None else _checked(value)


def _llama_calls(text: str) -> list[ToolCall]:
    """A turn that is nothing but calls; several are separated by semicolons."""
    body, is_marked = text.strip(), PYTHON_TAG in text
    body = body.partition(PYTHON_TAG)[2].strip() if is_marked else body
    if not is_marked and not (body.startswith("{") and '"name"' in body):
        return []
    calls: list[ToolCall] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body) and len(calls) < MAX_CALLS:
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return [*calls, ToolCall("", error="a call must be JSON")]
        calls.append(_checked(value))
        while at < len(body) and body[at] in "; \n\t\r":
            at += 1
    return calls


def _xml_call(body: str, tools: Mapping[str, Any]) -> ToolCall:
    match = FUNCTION.search(body)
    if match is None:
        return ToolCall("", error="a call must be <function=NAME>...</function>")
    name = match[1]
    types = tools.get(name, {}).get("parameters", {}).get("properties", {})
    arguments = {key: _typed(text, types.get(key, {})) for key, text in PARAMETER.findall(match[2])}
    return ToolCall(name, arguments)


def _tagged_calls(text: str, tools: Mapping[str, Any]) -> list[ToolCall]:
    if not tools:
        return []
    names = "|".join(sorted(map(re.escape, tools), key=len, reverse=True))
    tagged = re.compile(rf"<({names})>(.*?)(?:</\1>|\Z)", re.DOTALL)
    return [_tagged_call(name, body.strip(), tools[name]) for name, body in tagged.findall(text)]


def _tagged_call(name: str, body: str, tool: Mapping[str, Any]) -> ToolCall:
    properties = tool.get("parameters", {}).get("properties", {})
    if len(properties) == 1:
        ((key, kind),) = properties.items()
        value = _json(body)
        if not (isinstance(value, dict) and key in value):
            return ToolCall(name, {key: _typed(body, kind)})
        return ToolCall(name, value)
    value = _json(body) if body else {}
    if not isinstance(value, dict):
        return ToolCall(name, error="the arguments of a call must be a JSON object")
    return ToolCall(name, value)


def _typed(text: str, kind: Mapping[str, Any]) -> Any:
    """The text as a value of a parameter's type; as it is where it is none."""
    if kind.get("type") == "string":
        return text
    value = _json(text)
    return text if value is None else value
