"""How an episode may open, and where its turns lie in the response.

Owns: both, and a response as people read it. Does not own: the words and records of episodes
(`types.py`), or how ids and text of a turn belong together (`environments/`). Invariant: only token
versions say what the model wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from llamarl.types import NO_VERSION, VersionSpan

ASSISTANT, OBSERVATION = "assistant", "observation"
"""Who speaks in a turn: the model, or its environment."""
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""Between which a model thinks, in a turn."""
OPENING = "opening"
"""The role of what stands before the turns of a record if the environment made it: all that the
model saw first."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What the model sees first in an episode, in place of the prompt of its row: these messages,
    and tools of these schemas. The environment answers calls by its `step`, where the last message
    then has `tool_calls`, as chat templates take them."""

    messages: list[dict[str, Any]]
    schemas: Sequence[dict[str, Any]] = ()


def wrong_opening(messages: object, schemas: object) -> str:
    """What these of an Opening must be instead; empty if they are what chat templates take."""
    if not isinstance(messages, list) or not messages:
        return f"have a list of messages, got {messages!r:.80}"
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if _is_object(message) else [None]
        if not all(isinstance(text, str) for text in texts):
            return f"have a role and a text as content in each message, got {message!r:.80}"
    return wrong_schemas(schemas)


def wrong_schemas(schemas: object) -> str:
    """What these schemas of tools must be instead; empty if chat templates and the reading of calls
    can take them."""
    if not isinstance(schemas, Sequence) or isinstance(schemas, str | bytes):
        return f"have a list of tools, got {schemas!r:.80}"
    for tool in schemas:
        form = "be {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        if not _is_object(tool) or tool.get("type", "function") != "function":
            return f"{form} for each tool, got {tool!r:.80}"
        function = tool.get("function")
        if (
            not _is_object(function)
            or not isinstance(name := function.get("name"), str)
            or not name
        ):
            return f"{form} for each tool, got {tool!r:.80}"
        parameters = function.get("parameters", {})
        properties = parameters.get("properties", {}) if _is_object(parameters) else None
        if not _is_object(properties) or not all(map(_is_object, properties.values())):
            got = f"got {parameters!r:.80} for {name:.40}"
            return f"have a JSON schema of an object as parameters of each tool, {got}"
    return ""


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Runs of equal versions in `versions` int [T], as if no observation stood between them."""
    versions = versions[versions != NO_VERSION]
    if not len(versions):
        return ()
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(version=int(versions[start]), num_tokens=end - start)
        for start, end in zip(starts, ends, strict=True)
    )


def turn_start(versions: np.ndarray) -> int:
    """Where the last turn begins in a response of these token versions [T]: after its last
    observation."""
    observed = np.flatnonzero(versions == NO_VERSION)
    return int(observed[-1]) + 1 if len(observed) else 0


def last_turn(ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """What the model wrote last of a response `ids` [T]."""
    return ids[turn_start(versions) :]


def turns_of(
    ids: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str]
) -> list[dict[str, str]]:
    """A response [T] as messages, {"role": "assistant" or "observation", "content": its text}: of a
    rollout that takes no turns, one."""
    is_observed = versions == NO_VERSION
    starts = np.flatnonzero(is_observed[1:] != is_observed[:-1]) + 1
    runs = zip(np.split(ids, starts), np.split(is_observed, starts), strict=True)
    return [
        {"role": OBSERVATION if observed[:1].any() else ASSISTANT, "content": decode(run)}
        for run, observed in runs
    ]


def conversation(turns: Sequence[Mapping[str, str]]) -> str:
    """Turns as people read them: a line for each, and observations in brackets."""
    texts = [(turn["content"], turn["role"] == OBSERVATION) for turn in turns]
    return "\n".join(f"[{text.strip()}]" if is_observed else text for text, is_observed in texts)
