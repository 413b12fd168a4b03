"""Demonstrations: data rows with answers, as the ids that a trainer learns from.

Owns: what a row must hold, which of its tokens the assistant wrote, and their arrays. Does not own:
files (`prompt_files.py`), or the order (`prompt_stream.py`). Invariant: what stands before an
answer has the ids with which a rollout of `llamarl train` would begin there, and an answer ends
with a token at which a generator stops.

A demonstration travels as a Prompt: `token_ids` are those of the whole, and `fields[WRITTEN]` lists
what the assistant wrote of them, as [start, end].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamarl.config import DataConfig
from llamarl.data.tokenizer import Message, Tokenizer
from llamarl.data_row import value_at
from llamarl.environments.prompt_files import shorten_value
from llamarl.environments.prompts import messages_of, question_of
from llamarl.episode import version_spans
from llamarl.types import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    NO_VERSION,
    PROMPT_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
    Prompt,
    RolloutInfo,
)

WRITTEN = "written"
ASSISTANT = "assistant"
Part = tuple[str, bool, bool]
"""A text, whether it gets the tokenizer's special tokens, and whether the assistant wrote it."""


def make_demonstration(
    number: int, row: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer
) -> Prompt:
    """The demonstration of a row. ValueError if it lacks its fields, has no answer, or a chat
    template that does not show where an answer begins and ends."""
    field = data.completion_field
    question = question_of(row, data)
    answer = None if field is None else _answer_of(row, field)
    is_chat = data.chat or isinstance(question, list) or isinstance(answer, list)
    if is_chat and not tokenizer.has_chat_template:
        must = f"{data.prompt_field!r} must be text for a tokenizer without a chat template"
        raise ValueError(f"{must}, got messages with {tokenizer.folder}")
    if is_chat:
        before = messages_of(row, data)
        added = [] if field is None else _messages(answer, field)
        first = len(before) if field is not None else 0
        parts = [*_chat_parts([*before, *added], first, tokenizer)]
    elif field is None:
        must = f"{data.prompt_field!r} must be a list of messages with data.completion_field=null"
        raise ValueError(f"{must}, got {shorten_value(question)}")
    else:
        asked, given = _text(question, data.prompt_field), _text(answer, field)
        parts = [(asked, True, False), (given, False, True)]
    ids: list[int] = []
    written: list[list[int]] = []
    for text, special, is_written in parts:
        start = len(ids)
        ids += tokenizer.encode(text, special=special)
        if is_written:
            if not is_chat:
                ids.append(tokenizer.eos_token_ids[0])
            written.append([start, len(ids)])
    if not written or not written[0][0]:
        raise ValueError("a demonstration must begin with a token before the answer, got none")
    text = "".join(text for text, _, _ in parts)
    return Prompt(prompt_id=number, text=text, token_ids=tuple(ids), fields={WRITTEN: written})


def truncate(demonstration: Prompt, num_tokens: int) -> Prompt | None:
    """Its first tokens; None if the assistant wrote none of them."""
    spans = [[start, min(end, num_tokens)] for start, end in demonstration.fields[WRITTEN]]
    spans = [span for span in spans if span[0] < span[1]]
    ids = demonstration.token_ids[:num_tokens]
    return replace(demonstration, token_ids=ids, fields={WRITTEN: spans}) if spans else None


def as_row(demonstration: Prompt, row_id: int, version: int) -> tuple[RolloutInfo, Columns]:
    """What stands for a rollout, as if `version` had written the answers: they are trained, and the
    rest of the response is only context. Nothing was drawn, so log mu is 0."""
    ids = np.array(demonstration.token_ids, np.int32)
    spans = demonstration.fields[WRITTEN]
    first = spans[0][0]
    versions = np.full(len(ids), NO_VERSION, np.int32)
    for start, end in spans:
        versions[start:end] = version
    ids, prompt, versions = ids[first : spans[-1][1]], ids[:first], versions[first : spans[-1][1]]
    finish = FinishReason.STOP
    rollout = RolloutInfo(
        row_id=row_id,
        num_prompt_tokens=len(prompt),
        num_tokens=len(ids),
        spans=version_spans(versions),
        finish_reason=finish,
    )
    cells: dict[str, np.ndarray] = {
        PROMPT_ID: np.array([demonstration.prompt_id], np.float64),
        PROMPT_IDS: prompt,
        RESPONSE_IDS: ids,
        TOKEN_VERSIONS: versions,
        GENERATOR_LOGPROBS: np.zeros(len(ids), np.float32),
        SAMPLING: np.array([1.0, 0, 1.0, len(ids), 0, FINISH_CODES[finish]], np.float64),
    }
    return rollout, {name: [cell] for name, cell in cells.items()}


def _chat_parts(messages: Sequence[Message], first: int, tokenizer: Tokenizer) -> Iterator[Part]:
    """The conversation up to its last answer, cut where the answers among `messages[first:]` begin
    and end."""
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    if not answers:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"a demonstration must have a turn of the assistant, got {roles}")
    whole, at = tokenizer.render_chat(messages, is_open=False), 0
    must = f"the chat template of {tokenizer.folder} must"
    for i in answers:
        before = tokenizer.render_chat(messages[:i])
        if not whole.startswith(before) or len(before) < at:
            raise ValueError(
                f"{must} render what stands before an answer alike with it and without"
            )
        end = _end_of_turn(whole, len(before), tokenizer)
        if end < 0:
            raise ValueError(f"{must} end an answer with a token that ends a completion")
        yield whole[at : len(before)], False, False
        yield whole[len(before) : end], False, True
        at = end


def _end_of_turn(text: str, begin: int, tokenizer: Tokenizer) -> int:
    """Behind the first token from `begin` on that ends a completion; -1 without one."""
    ends = [each for each, i in tokenizer.special_ids.items() if i in tokenizer.eos_token_ids]
    found = [(text.find(end, begin), end) for end in ends]
    return min((at + len(end) for at, end in found if at >= 0), default=-1)


def _answer_of(row: Mapping[str, Any], field: str) -> Any:
    try:
        return value_at(row, field)
    except KeyError:
        got = ", ".join(map(repr, row)) or "no field at all"
        must = f"the row must have the field {field!r} (data.completion_field)"
        raise ValueError(f"{must}, got {got}") from None


def _messages(value: Any, field: str) -> list[Message]:
    """The messages in a field; a text is one of the assistant's."""
    if not isinstance(value, list):
        return [{"role": ASSISTANT, "content": _text(value, field)}]
    if not value or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
        must = f"{field!r} must be text or a list of messages with 'role' and 'content'"
        raise ValueError(f"{must}, got {shorten_value(value)}")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field!r} must be text that is not blank, got {shorten_value(value)}")
    return value
