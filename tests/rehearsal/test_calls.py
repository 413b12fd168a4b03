"""Calls that a rehearsal writes are those that a run reads, in every family."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.config import EnvironmentConfig
from llamarl.model.tokenizer import Tokenizer
from llamarl.rehearsal.calls import (
    make_arguments,
    make_wrong_arguments,
    write_broken_call,
    write_call,
)
from llamarl.scoring.definition import Kind
from llamarl.scoring.tool_calls import ToolCall
from llamarl.scoring.turn_format import TurnFormat
from tests.model import chat_templates

QUESTION = "What is 12*34 + 5?"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "most": {"type": ["integer", "null"]},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "order": {"type": "string", "enum": ["new", "old"]},
                "places": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["query", "most", "share", "exact", "order", "places"],
        },
    },
}
FAMILIES = {
    "hermes": chat_templates.QWEN,
    "xml": chat_templates.QWEN,
    "llama": chat_templates.LLAMA,
    "tagged": chat_templates.PLAIN,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        family: chat_templates.write_tokenizer(Path(tmp_path_factory.mktemp(family)), template)
        for family, template in FAMILIES.items()
    }


def read(tokenizers: dict[str, Tokenizer], family: str, write: Any) -> list[ToolCall]:
    tokenizer = tokenizers[family]
    form = TurnFormat(tokenizer, Kind((SEARCH,)), EnvironmentConfig(calls=family))
    ids = tokenizer.encode(write(form, tokenizer), special=False)
    return form.read([*ids, tokenizer.eos_token_ids[0]]).calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_as_it_was_written(tokenizers: dict[str, Tokenizer], family: str) -> None:
    for seed in range(20):
        arguments = make_arguments(SEARCH, QUESTION, random.Random(seed))
        assert arguments.keys() == SEARCH["function"]["parameters"]["properties"].keys()  # type: ignore[index]
        (call,) = read(
            tokenizers,
            family,
            lambda form, tokenizer, given=arguments: write_call(form, tokenizer, "search", given),
        )
        assert (call.name, call.arguments, call.error) == ("search", arguments, ""), seed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_call_is_none(tokenizers: dict[str, Tokenizer], family: str) -> None:
    (call,) = read(tokenizers, family, lambda form, _: write_broken_call(form, "search"))
    assert call.error


def test_wrong_arguments_lack_one_or_have_another_type() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        right = make_arguments(SEARCH, QUESTION, random.Random(seed))
        wrong = make_wrong_arguments(SEARCH, QUESTION, rng)
        differing = [name for name in right if wrong.get(name) != right[name]]
        assert len(differing) == 1, seed
    empty = {"type": "function", "function": {"name": "now"}}
    assert make_wrong_arguments(empty, QUESTION, random.Random(0)) == {"surplus": 1}
