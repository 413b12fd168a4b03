"""Readers of the tool calls that models write, by family, and the tools that a recipe selects by
name."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llamarl.core.groups import END_OF_THOUGHT, THOUGHT
from llamarl.scoring.definition import Schema
from llamarl.scoring.sandbox.containers import ProgramLimits, run_in_turn

NULLS = ("null", "none")
BOOLEANS = {"true": True, "false": False}
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
MAX_LITERAL_CHARS = 100_000  # Python's own reader of a longer text takes long


def typed(text: str, schema: object) -> Any:
    """Return the text as a value of a parameter of this JSON schema."""
    types, word = _types(schema), text.strip()
    if "null" in types and (word.lower() in NULLS or (not word and "string" not in types)):
        return None
    if "string" in types:
        return text
    if "boolean" in types and word.lower() in BOOLEANS:
        return BOOLEANS[word.lower()]
    value = _json(word, parse_constant=_refuse)
    if not types:
        return text if value is None and word != "null" else value
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    if _fits(value, types):
        return value
    value = _literal(word) if {"array", "object"} & types else None
    return value if value is not None and _fits(value, types) else text


def _types(schema: object) -> set[str]:
    """Return the names of the JSON types that a schema allows; an empty set if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", [])
    texts = [each for each in _entries(given) if isinstance(each, str)]
    found = {given} if isinstance(given, str) else {*texts}
    if not found:
        choices = _entries(schema.get("enum")) + [schema.get("const")] * ("const" in schema)
        found = {NAMES[type(value)] for value in choices if type(value) in NAMES}
    for key in ("anyOf", "oneOf"):
        for choice in _entries(schema.get(key)):
            found |= _types(choice)
    return found | {"null"} if schema.get("nullable") is True and found else found


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _fits(value: object, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return bool({"integer", "number"} & types)
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value)) in types


def _json(text: str, **options: Any) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    """Raise ValueError for NaN and Infinity, which JSON itself does not have."""
    raise ValueError(name)


def _literal(text: str) -> Any:
    """Return a list or an object in Python's spelling, which models write too; None for anything
    else."""
    if text[:1] not in ("[", "{") or len(text) > MAX_LITERAL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd syntax in what a model wrote
            value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


MAX_CALLS = 64  # of one turn; a model that repeats itself would write thousands
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
END_OF_PARAMETER_TAG = "</parameter>"
FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>\n?")
# An argument may hold text like its end tag; the real one has a valid continuation.
END_OF_PARAMETER = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))")
END_OF_OPEN_PARAMETER = re.compile(r"(?:</function>\s*)?</tool_call>|</function>\s*\Z|</think>|\Z")
END_OF_FUNCTION = re.compile(r"\s*(?:</function>\s*)?(?:</tool_call>|\Z)")
STRAY = re.compile(r"</(?:parameter|function|tool_call)>")
NEXT_CALL = re.compile(r"</tool_call>\s*<tool_call>\s*<function=")
BETWEEN = re.compile(r"[;\s]*")
END_OF_JSON = re.compile(r"\s*(?:</tool_call>|\Z)")
OTHER_ARGUMENTS = "<arg_key>"  # of GLM-4.5, whose calls have the same marks and another form
PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = {"parameters", "arguments"}
CALL_KEYS = {"name", "type", "id"} | ARGUMENTS
NOTHING = object()  # where no JSON stands


class ToolCall(NamedTuple):
    """One call; `error` says why it cannot be run."""

    name: str
    arguments: Mapping[str, Any] = {}
    error: str = ""


Tools = Mapping[str, Any]
"""The tools that may be called, by name."""


def family_of(template: str, response_template: object) -> str | None:
    """Return the family of a checkpoint with this chat template; None if it shows no form of
    calls."""
    if response_template is not None:
        return "template"
    if CALL in template and OTHER_ARGUMENTS not in template:
        return "xml" if "<function=" in template else "hermes"
    is_llama = PYTHON_TAG in template or ('"parameters": ' in template and "ipython" in template)
    return "llama" if is_llama else None


def template_calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls of a message that the tokenizer's own response template found."""
    found = message.get("tool_calls")
    return [_checked(call.get("function", call)) for call in found or ()][:MAX_CALLS]


def _checked(value: object) -> ToolCall:
    """Return a call from {"name": ..., "arguments" or "parameters": {...}}."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return ToolCall("", error="a call must be an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, error="the arguments of a call must be an object")
    return ToolCall(name, arguments)


def find_calls(
    text: str, family: str, schemas: Sequence[Schema], *, is_thinking: bool = False
) -> list[tuple[int, ToolCall]]:
    """Return the calls in one turn of a model, which may hold special tokens, each with the place
    where it begins; at most MAX_CALLS. `is_thinking`: the turn begins within the model's
    thinking."""
    tools = {schema["function"]["name"]: schema["function"] for schema in schemas}
    if family == "llama":
        return _llama_calls(tools, text, is_thinking)[:MAX_CALLS]
    names = tools if family == "tagged" else ["tool_call"]
    marks = [f"<{re.escape(name)}>" for name in sorted(names, key=len, reverse=True)]
    mark = re.compile("|".join([*marks, THOUGHT, END_OF_THOUGHT]))
    found: list[tuple[int, ToolCall]] = []
    at = _after_thought(text, 0) if is_thinking else 0
    while (begin := mark.search(text, at)) is not None:
        if begin[0][1:-1] in names:
            call, at = MARKED[family](tools, text, begin)
            found.append((begin.start(), call))
        elif begin[0] == THOUGHT:
            at = _after_thought(text, begin.end())
        else:  # all before it was thinking, whose beginning the prompt or nobody has written
            found.clear()
            at = begin.end()
    return found[:MAX_CALLS]


def _after_thought(text: str, at: int) -> int:
    """Return the place where the thinking that is in progress at `at` ends."""
    end = text.find(END_OF_THOUGHT, at)
    return len(text) if end < 0 else end + len(END_OF_THOUGHT)


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins here, after blanks, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return NOTHING, at


def _wrong(text: str, at: int, must: str) -> tuple[ToolCall, int]:
    """Return a call that begins here and cannot be read, and where it ends: at its end mark, or
    where the thinking around it ends."""
    ends = [text.find(END_OF_CALL, at), text.find(END_OF_THOUGHT, at)]
    end = min((place for place in ends if place >= 0), default=len(text))
    is_closed = end == ends[0]
    return ToolCall("", error=f"a call must {must}"), end + len(END_OF_CALL) * is_closed


def _hermes_call(tools: Tools, text: str, begin: re.Match[str]) -> tuple[ToolCall, int]:
    value, at = _json_at(text, begin.end())
    end = END_OF_JSON.match(text, at)
    if value is NOTHING or end is None:
        return _wrong(text, begin.end(), "be JSON")
    return _checked(value), end.end()


def _llama_calls(tools: Tools, text: str, is_thinking: bool) -> list[tuple[int, ToolCall]]:
    """Return the calls of a turn that, after its thinking, is nothing but calls; several are
    separated by semicolons."""
    is_thinking = is_thinking or text.lstrip().startswith(THOUGHT)
    begin = _after_thought(text, 0) if is_thinking else 0
    while True:
        calls, at = _llama_calls_at(tools, text, begin)
        if at is None:
            return [(max(begin, text.find(PYTHON_TAG, begin)), call) for call in calls]
        begin = at


def _llama_calls_at(tools: Tools, text: str, begin: int) -> tuple[list[ToolCall], int | None]:
    """Return the calls that the turn consists of from this place on; and the place where thinking
    ends in there, if its beginning was in the prompt or is missing, else None."""
    at, is_marked = text.find(PYTHON_TAG, begin), PYTHON_TAG in text[begin:]
    at = at + len(PYTHON_TAG) if is_marked else begin
    calls: list[ToolCall] = []
    is_call = is_marked or (text[at:].lstrip().startswith("{") and '"name"' in text[at:])
    while is_call and text[at:].strip() and len(calls) < MAX_CALLS:
        value, at = _json_at(text, at)
        if value is NOTHING:
            calls.append(ToolCall("", error="a call must be JSON"))
            break
        if not is_marked and _is_answer(value, tools):
            break
        calls.append(_checked(value))
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
    thought = text.find(END_OF_THOUGHT, at)
    return calls, None if thought < 0 else thought + len(END_OF_THOUGHT)


def _is_answer(value: object, tools: Tools) -> bool:
    """Return whether this is an object with a name that calls nothing."""
    if not isinstance(value, dict):
        return False
    is_bare = not value.keys() & ARGUMENTS
    return bool(value.keys() - CALL_KEYS) or (is_bare and value.get("name") not in [*tools])


def _xml_call(tools: Tools, text: str, begin: re.Match[str]) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, begin.end())
    if function is None:
        return _wrong(text, begin.end(), "be <function=NAME>...</function>")
    name, at = function[1], function.end()
    schemas, arguments, is_clear = _properties(tools.get(name)), {}, True
    while (parameter := PARAMETER.match(text, at)) is not None:
        key, start = parameter[1], parameter.end()
        end = END_OF_PARAMETER.search(text, start)
        stop = end or END_OF_OPEN_PARAMETER.search(text, start)
        assert stop is not None, "one ends with the text"
        value = text[start : stop.start()].removesuffix("\n")
        arguments[key] = typed(value, schemas.get(key))
        is_closed = end is not None or END_OF_PARAMETER_TAG not in value
        is_clear = is_clear and is_closed and NEXT_CALL.search(value) is None
        at = stop.start() if end is None else end.end()
    closed = END_OF_FUNCTION.match(text, at)
    if closed is None:
        wrong, end_of_call = _wrong(text, at, "hold nothing but <parameter=NAME>...</parameter>")
        return ToolCall(name, error=wrong.error), end_of_call
    following = text.find(CALL, closed.end())
    following = len(text) if following < 0 else following
    if not is_clear or STRAY.search(text, closed.end(), following):
        why = "a call must not have its own end tags in an argument, nor lack one"
        return ToolCall(name, error=why), following
    return ToolCall(name, arguments), closed.end()


def _tagged_call(tools: Tools, text: str, begin: re.Match[str]) -> tuple[ToolCall, int]:
    """Read a call between the tags of its tool's name. An argument that is JSON may hold the end
    tag, plain text may not."""
    name, start = begin[0][1:-1], begin.end()
    close = f"</{name}>"
    value, stop = _json_at(text, start)
    following = text[stop:].lstrip()
    if not isinstance(value, dict) or (following and not following.startswith(close)):
        stop = text.find(close, start)
        if is_open := stop < 0:
            thought = text.find(END_OF_THOUGHT, start)
            stop = len(text) if thought < 0 else thought
        following = "" if is_open else text[stop:]
        value = NOTHING if text[start:stop].strip() else {}
    end = len(text) - len(following) + len(close) if following else stop
    body, properties = text[start:stop].strip(), _properties(tools[name])
    if len(properties) == 1:
        ((key, schema),) = properties.items()
        is_named = isinstance(value, dict) and key in value
        return ToolCall(name, value if is_named else {key: typed(body, schema)}), end
    if not isinstance(value, dict):
        return ToolCall(name, error="the arguments of a call must be a JSON object"), end
    return ToolCall(name, value), end


MARKED: dict[str, Callable[[Tools, str, re.Match[str]], tuple[ToolCall, int]]] = {
    "hermes": _hermes_call,
    "xml": _xml_call,
    "tagged": _tagged_call,
}
"""The readers of families whose calls stand between marks: (the tools by name, a turn, the mark
that begins a call in it) -> the call, and where it ends."""


def _properties(tool: object) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters; empty if it is no tool, or has none."""
    parameters = tool.get("parameters") if isinstance(tool, Mapping) else None
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


SHOWN_CHARS = 4000  # of what a program wrote; the middle of more is left out


def make_python(limits: ProgramLimits) -> Callable[..., Any]:
    """Return the tool `python`."""

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program; it has no network and no files but a scratch folder
        """
        ran = await run_in_turn(code, "", limits)
        parts = [ran.stdout, ran.stderr]
        if ran.ended_for:
            parts.append(f"(ended: too much {ran.ended_for})")
        elif not ran.is_good and not ran.stderr:
            parts.append(f"(ended with {ran.exit_code})")
        return shorten("\n".join(part.rstrip() for part in parts if part.strip()))

    return python


READY: dict[str, Callable[[ProgramLimits], Callable[..., Any]]] = {"python": make_python}
"""Ready tools by their names in `environment.tools`."""


def shorten(text: str) -> str:
    """Return at most SHOWN_CHARS of the text, from both ends."""
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
