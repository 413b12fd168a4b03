"""Demonstrations: data rows with answers, as the ids that a trainer learns from.

A demonstration travels as a Prompt: `token_ids` are those of the whole, and `fields[WRITTEN]` lists
what the assistant wrote of them, as [start, end].

What stands before an answer has the ids with which a rollout of `llamarl train` would begin
there, and an answer ends with a token at which a generator stops."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.core.config import DataConfig
from llamarl.core.groups import version_spans
from llamarl.core.records import (
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
    value_at,
)
from llamarl.model.messages import NumberedRow, Schema, read_messages, read_tools, shorten_value
from llamarl.model.prompt_rules import (
    BATCH_ROWS,
    DROPPED,
    OWN_TEMPLATE,
    TRUNCATED,
    check_template,
    located,
    messages_of,
    question_of,
    text_of,
)
from llamarl.model.text_ids import unmarked
from llamarl.model.tokenizer import ASSISTANT, Message, Tokenizer

WRITTEN = "written"


@dataclass(frozen=True)
class Passage:
    """A text of a demonstration: what stands before it, whether it gets the tokenizer's special
    tokens, whether the assistant wrote it, and whether it gets the token that ends a completion,
    unless it has one."""

    text: str
    before: str = ""
    is_special: bool = False
    is_written: bool = False
    gets_end: bool = False


@dataclass(frozen=True, kw_only=True)
class DemonstrationRules:
    """The rules make a demonstration of a row; `limit` names where `data.max_prompt_tokens` comes
    from."""

    data: DataConfig
    tokenizer: Tokenizer
    limit: str = "data.max_prompt_tokens"
    counts: Counter[str] = field(default_factory=Counter)
    """Rows that were DROPPED, or TRUNCATED, so far."""

    def __post_init__(self) -> None:
        check_template(self.data, self.tokenizer)

    def make_all(self, rows: Iterable[NumberedRow], place: str | Path) -> Iterator[Prompt]:
        """Yield the demonstrations of these rows, in order; `prompt_id` is the row's number.

        Raises a one-line ValueError that names `place` and number for the first row that lacks its
        fields, has no answer or is too long, or whose chat template does not show where an answer
        begins and ends. With data.overlong drop those that are too long are left out, with truncate
        their ends, and `counts` has them.
        """
        rows = iter(rows)
        while batch := [*islice(rows, BATCH_ROWS)]:
            rendered: list[tuple[int, list[Passage]]] = []
            wrong: ValueError | None = None
            for number, row in batch:
                try:
                    rendered.append((number, _parts(row, self.data, self.tokenizer)))
                except ValueError as error:
                    wrong = located(place, number, error)
                    break
            ids = {}
            for special in (False, True):
                every = (part for _, parts in rendered for part in parts)
                some = [part for part in every if part.is_special == special]
                texts, before = [part.text for part in some], [part.before for part in some]
                found = self.tokenizer.encode_all(texts, special=special, before=before)
                ids[special] = iter(found)
            for number, parts in rendered:
                try:
                    made = self._join(
                        number, [(each, next(ids[each.is_special])) for each in parts]
                    )
                except ValueError as error:
                    raise located(place, number, error) from error
                if made is not None:
                    yield made
            if wrong is not None:
                raise wrong

    def _join(self, number: int, parts: Sequence[tuple[Passage, list[int]]]) -> Prompt | None:
        """Return the demonstration of these parts with their ids; None for one left out."""
        ids: list[int] = []
        written: list[list[int]] = []
        for part, own in parts:
            start = len(ids)
            ids += own
            if part.is_written:
                ends = self.tokenizer.eos_token_ids
                if part.gets_end and not (own and own[-1] in ends):
                    ids.append(self.tokenizer.eos_token_ids[0])
                written.append([start, len(ids)])
        if not written[0][0]:
            raise ValueError("a demonstration must begin with a token before the answer, got none")
        text = unmarked("".join(part.text for part, _ in parts))
        found = Prompt(prompt_id=number, text=text, token_ids=tuple(ids), fields={WRITTEN: written})
        most, overlong = self.data.max_prompt_tokens, self.data.overlong
        if len(ids) <= most:
            return found
        if overlong == "error":
            must = f"a demonstration must have at most {most} tokens ({self.limit})"
            raise ValueError(f"{must}, got {len(ids)}")
        cut = truncate(found, most) if overlong == "truncate" else None
        self.counts[DROPPED if cut is None else TRUNCATED] += 1
        return cut


def _parts(row: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer) -> list[Passage]:
    """Return the passages of the row's demonstration, in order."""
    field = data.completion_field
    question = question_of(row, data)
    answer = None
    if field is not None:
        try:
            answer = value_at(row, field)
        except KeyError:
            got = ", ".join(map(repr, row)) or "no field at all"
            must = f"the row must have the field {field!r} (data.completion_field)"
            raise ValueError(f"{must}, got {got}") from None
    if data.chat or isinstance(question, list) or isinstance(answer, list):
        if not tokenizer.has_chat_template:
            must = f"{data.prompt_field!r} must be text for a tokenizer without a chat template"
            must += OWN_TEMPLATE
            raise ValueError(f"{must}, got messages with {tokenizer.folder}")
        before = messages_of(row, data)
        if field is None:
            return [*_chat_parts(before, 0, tokenizer, read_tools(row))]
        added: list[Message]
        if isinstance(answer, list):
            added = [*read_messages(answer, field)]
        else:
            added = [{"role": ASSISTANT, "content": text_of(answer, field)}]
        return [*_chat_parts([*before, *added], len(before), tokenizer, read_tools(row))]
    if field is None:
        must = f"{data.prompt_field!r} must be a list of messages with data.completion_field=null"
        raise ValueError(f"{must}, got {shorten_value(question)}")
    asked, given = text_of(question, data.prompt_field), text_of(answer, field)
    answer = Passage(given, before=asked, is_written=True, gets_end=True)
    return [Passage(asked, is_special=True), answer]


def truncate(demonstration: Prompt, num_tokens: int) -> Prompt | None:
    """Return its first tokens; None if the assistant wrote none of them."""
    spans = [[start, min(end, num_tokens)] for start, end in demonstration.fields[WRITTEN]]
    spans = [span for span in spans if span[0] < span[1]]
    ids = demonstration.token_ids[:num_tokens]
    return replace(demonstration, token_ids=ids, fields={WRITTEN: spans}) if spans else None


def as_row(demonstration: Prompt, row_id: int, version: int) -> tuple[RolloutInfo, Columns]:
    """Return a row that stands for a rollout, as if `version` had written the answers: they are
    trained, and the rest of the response is only context. Nothing was drawn, so log mu is 0."""
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


def _chat_parts(
    messages: Sequence[Message], first: int, tokenizer: Tokenizer, tools: Sequence[Schema]
) -> Iterator[Passage]:
    """Yield the conversation up to its last answer, cut where the answers among `messages[first:]`
    begin and end."""
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    if not answers:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"a demonstration must have a turn of the assistant, got {roles}")
    messages = messages[: answers[-1] + 1]  # templates show some thinking of last turns alone
    whole, at = tokenizer.render_chat(messages, tools, is_open=False), 0
    ends = [each for each, i in tokenizer.special_ids.items() if i in tokenizer.eos_token_ids]
    must = f"the chat template of {tokenizer.folder} must"
    for i in answers:
        before = tokenizer.render_chat(messages[:i], tools)
        if not whole.startswith(before) or len(before) < at:
            raise ValueError(
                f"{must} render what stands before an answer alike with it and without"
            )
        # Behind the first token from there on that ends a completion.
        found = [(whole.find(each, len(before)), each) for each in ends]
        end = min((start + len(each) for start, each in found if start >= 0), default=-1)
        if end < 0:
            raise ValueError(f"{must} end an answer with a token that ends a completion")
        yield Passage(whole[at : len(before)], before=whole[:at])
        yield Passage(whole[len(before) : end], before=before, is_written=True)
        at = end
