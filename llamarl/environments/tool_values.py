"""The value of an argument that a model wrote as plain text, by the schema of its parameter.

Owns: which spellings are values of a type. Does not own: the forms of calls (`tool_calls.py`).
Invariant: a text that is no value of the type stays as it is, so that the tool, or Python, says
what is wrong with it; where a text is allowed, what was written is that text.
"""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

NULLS = ("null", "none")
BOOLEANS = {"true": True, "false": False}
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
MAX_LITERAL_CHARS = 100_000  # Python's own reader of a longer text takes long


def typed(text: str, schema: object) -> Any:
    """The text as a value of a parameter of this JSON schema."""
    types, word = _types(schema), text.strip()
    if "null" in types and (word.lower() in NULLS or (not word and "string" not in types)):
        return None
    if "string" in types:
        return text
    if "boolean" in types and word.lower() in BOOLEANS:
        return BOOLEANS[word.lower()]
    value = _json(word)
    if not types:
        return text if value is None and word != "null" else value
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    if _fits(value, types):
        return value
    value = _literal(word) if {"array", "object"} & types else None
    return value if value is not None and _fits(value, types) else text


def _types(schema: object) -> set[str]:
    """The names of JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", [])
    found = {given} if isinstance(given, str) else {*filter(_is_text, _entries(given))}
    if not found:
        choices = _entries(schema.get("enum")) + [
            schema[key] for key in ("const",) if key in schema
        ]
        found = {NAMES[type(value)] for value in choices if type(value) in NAMES}
    for key in ("anyOf", "oneOf"):
        for choice in _entries(schema.get(key)):
            found |= _types(choice)
    return found | {"null"} if schema.get("nullable") is True and found else found


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _fits(value: object, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return bool({"integer", "number"} & types)
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value)) in types


def _json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    """JSON itself has no NaN and no Infinity."""
    raise ValueError(name)


def _literal(text: str) -> Any:
    """A list or an object in Python's spelling, which models write too; None for anything else."""
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
