"""Requests of a program that no turn can answer are refused; rows and openings that no environment
can take are too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llamarl.core.records import StageStatus
from llamarl.scoring.definition import Kind, schemas_of
from llamarl.scoring.episodes import load
from tests.unit.test_agent import TOOL, USER, Scripted, asked
from tests.unit.test_episodes import prompt

FORM = "tools must be {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "function", "name": "add", "parameters": {}}], f"{FORM} for each tool, got "),
        (["add"], f"{FORM} for each tool, got 'add'"),
        ({"add": 1}, "tools must have a list of tools, got {'add': 1}"),
        ("add", "tools must have a list of tools, got 'add'"),
        (0, "tools must have a list of tools, got 0"),
        ([{"type": "function"}], f"{FORM} for each tool, got "),
        ([{"type": "function", "function": "add"}], f"{FORM} for each tool, got "),
        ([{"type": "function", "function": {"name": 3}}], f"{FORM} for each tool, got "),
        ([{"type": "web_search"}], f"{FORM} for each tool, got "),
        ([TOOL, None], f"{FORM} for each tool, got None"),
        (
            [{"type": "function", "function": {"name": "add", "parameters": ["a"]}}],
            "tools must have a JSON schema of an object as parameters of each tool, got ['a'] for ",
        ),
        (
            [{"function": {"name": "add", "parameters": {"properties": {"a": "integer"}}}}],
            "tools must have a JSON schema of an object as parameters of each tool, got ",
        ),
    ],
)
async def test_tools_of_another_form_are_refused(tools: object, message: str) -> None:
    agent = Scripted()
    resetting = asyncio.create_task(agent.reset())
    status, error = await asked(await agent.url, {"messages": [USER], "tools": tools})
    assert status == 400
    assert error["message"].startswith(message)
    assert not resetting.done(), "the program may ask again"
    first = asyncio.create_task(asked(await agent.url, {"messages": [USER], "tools": [TOOL]}))
    assert (await resetting).schemas == [TOOL]
    agent.abandon()
    await first


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_calls": 3}, "tool_calls must be a list, got 3"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}],
            },
            "a tool call must be a function with arguments",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 20000}}],
            },
            "a tool call must be a function with arguments",
        ),
        ({"role": "tool", "content": "x", "name": [1]}, "name of a message must be text, got [1]"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "tool_call_id of a message must be"),
    ],
)
async def test_messages_of_another_form_are_refused(message: dict[str, Any], words: str) -> None:
    agent = Scripted()
    resetting = asyncio.create_task(agent.reset())
    status, error = await asked(await agent.url, {"messages": [USER, message, USER]})
    assert status == 400
    assert words in error["message"]
    resetting.cancel()


@pytest.mark.parametrize(
    ("kind", "field", "is_refused"),
    [
        (Kind((), True, has_step=True, is_agent=True), "url", True),
        (Kind((), True, has_step=True, is_agent=True), "self", True),
        (Kind((), True, has_step=True), "self", True),
        (Kind((), True, has_step=True), "url", False),
        (Kind((TOOL,)), "self", False),
    ],
)
def test_a_field_that_an_environment_gets_otherwise_is_refused_with_its_row(
    kind: Kind, field: str, is_refused: bool
) -> None:
    row = {"question": "q", field: "x"}
    if is_refused:
        with pytest.raises(ValueError, match=f"^the row's field '{field}' must have another name"):
            schemas_of(row, {"": kind})
    else:
        assert schemas_of(row, {"": kind}) == kind.schemas


OPENING = """
from llamarl.core.groups import Opening
class Opens:
    def reset(self, /, what, function=None, **row):
        user = {"role": "user", "content": "q"}
        return {
            "messages": Opening("q"), "empty": Opening([]), "role": Opening([{"content": "q"}]),
            "parts": Opening([{"role": "user", "content": [{"text": "q"}]}]),
            "tools": Opening([user], ["add"]), "good": Opening([user]),
        }[what]
    def step(self, messages): ...
environment = Opens
"""


@pytest.mark.parametrize("what", ["messages", "empty", "role", "parts", "tools", "good"])
async def test_an_opening_that_no_template_can_show_fails_its_episode(what: str) -> None:
    serve = load({"task_source": {"task.py": OPENING}, "tools": ["task"], "limits": {}})
    found = await serve(prompt(what=what, function="f"), "begin", [1, []])
    if what == "good":
        assert found == {"messages": [{"role": "user", "content": "q"}], "schemas": []}
    else:
        assert found["status"] == StageStatus.INVALID
        assert found["error"].startswith("what it returns must ")
