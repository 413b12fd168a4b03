"""The rules by which prompts are made from data rows.

A prompt is a pure function of its row and the rules."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from llamarl.core.config import DataConfig
from llamarl.core.records import Prompt, value_at
from llamarl.model.messages import NumberedRow, read_messages, read_tools, shorten_value
from llamarl.model.text_ids import unmarked
from llamarl.model.tokenizer import ASSISTANT, Tokenizer

SLACK = 10  # tokenizers drop blanks, and give one token to a word that they do not know
BATCH_ROWS = 512
OWN_TEMPLATE = " (data.chat_template may be a file that holds one)"
DROPPED, TRUNCATED = "dropped", "truncated"

Tools = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""A function from a data row to the schemas of the tools that the model may call."""


def no_tools(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return no schemas, for rollouts that are one answer."""
    return ()


class PromptTooLong(ValueError):  # noqa: N818 - what was found
    """A prompt has more tokens than it may have."""


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """The rules that make a prompt from a row.

    `limit` names where `data.max_prompt_tokens` comes from; `tools` are shown at the head of each
    chat, else those that the row itself has; `check` raises a ValueError for a row that lacks what
    a reward needs."""

    data: DataConfig
    tokenizer: Tokenizer
    limit: str = "data.max_prompt_tokens"
    tools: Tools = no_tools
    check: Callable[[Prompt], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """The number of rows that were DROPPED or TRUNCATED so far."""

    def __post_init__(self) -> None:
        check_template(self.data, self.tokenizer)

    @property
    def tokens(self) -> str:
        """The most tokens in words, such as "50 tokens (data.max_prompt_tokens)"."""
        return f"{self.data.max_prompt_tokens} tokens ({self.limit})"

    def make_all(self, rows: Iterable[NumberedRow], place: str | Path) -> Iterator[Prompt]:
        """Yield the prompts of these rows, in order; `prompt_id` is the row's number.

        Raises a one-line ValueError that names `place` and number for the first row whose question
        is missing, has a wrong type or is too long. Questions that are too long are left out with
        data.overlong drop, and cut with truncate; `counts` has their number."""
        rows = iter(rows)
        while batch := [*islice(rows, BATCH_ROWS)]:
            yield from self._make(batch, place)

    def make(self, row: Mapping[str, Any], number: int) -> Prompt:
        """Return the prompt of one row. Raises ValueError, without a place, also for a prompt that
        would be left out."""
        for prompt in self._make([(number, dict(row))], None):
            return prompt
        most = self.data.max_prompt_tokens
        raise PromptTooLong(f"the prompt must have at most {most} tokens (data.max_prompt_tokens)")

    def _make(self, batch: Sequence[NumberedRow], place: str | Path | None) -> Iterator[Prompt]:
        texts: list[tuple[int, dict[str, Any], str]] = []
        of_kind: dict[bool, list[int]] = {False: [], True: []}  # with special tokens: their places
        wrong: ValueError | None = None
        for number, row in batch:
            try:
                text, special = self._render(row)
            except ValueError as error:
                if isinstance(error, PromptTooLong) and self.data.overlong == "drop":
                    self.counts[DROPPED] += 1
                    continue
                wrong = located(place, number, error)
                break
            of_kind[special].append(len(texts))
            texts.append((number, row, text))
        found: dict[int, list[int]] = {}
        for special, places in of_kind.items():
            ids = self.tokenizer.encode_all([texts[i][2] for i in places], special=special)
            found.update(zip(places, ids, strict=True))
        for i, (number, row, text) in enumerate(texts):
            try:
                prompt = self._prompt(number, row, text, found[i])
            except ValueError as error:
                raise located(place, number, error) from error
            if prompt is not None:
                yield prompt
        if wrong is not None:
            raise wrong

    def _prompt(
        self, number: int, row: dict[str, Any], text: str, token_ids: list[int]
    ) -> Prompt | None:
        """Return the prompt of a row, or None if it is left out."""
        data, most = self.data, self.data.max_prompt_tokens
        if not token_ids:
            must = f"{data.prompt_field!r} must hold at least one token"
            raise ValueError(f"{must}, got {shorten_value(question_of(row, data))}")
        if len(token_ids) > most:
            if data.overlong == "drop":
                self.counts[DROPPED] += 1
                return None
            if data.overlong == "error":
                must = f"the prompt must have at most {self.tokens}"
                raise PromptTooLong(f"{must}, got {len(token_ids)}")
            self.counts[TRUNCATED] += 1
            token_ids = token_ids[-most:]
            text = self.tokenizer.decode_raw(token_ids)
        ids = tuple(token_ids)
        prompt = Prompt(prompt_id=number, text=unmarked(text), token_ids=ids, fields=row)
        if self.check is not None:
            self.check(prompt)
        return prompt

    def _render(self, row: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of a row's prompt, and whether it gets the tokenizer's special tokens.
        Too many characters are refused or cut here, before minutes go into their tokens."""
        data, question = self.data, question_of(row, self.data)
        if goes_through := data.chat or isinstance(question, list):
            messages = messages_of(row, data)
            if not self.tokenizer.has_chat_template:
                must = f"{data.prompt_field!r} must be text for a tokenizer without a chat template"
                must += OWN_TEMPLATE
                raise ValueError(f"{must}, got messages with {self.tokenizer.folder}")
            goes_on = messages[-1]["role"] == ASSISTANT
            if goes_on and messages[-1].get("tool_calls"):
                must = f"{data.prompt_field!r} must not end with a call, before its result"
                raise ValueError(f"{must}, got {shorten_value(messages[-1])}")
            tools = self.tools(row) or read_tools(row)
            text = self.tokenizer.render_chat(messages, tools, goes_on=goes_on)
        else:
            text = text_of(question, data.prompt_field)
        most_chars = SLACK * data.max_prompt_tokens * self.tokenizer.max_token_chars
        if len(text) > most_chars:
            if data.overlong != "truncate":
                must = f"the prompt must have at most {self.tokens}"
                raise PromptTooLong(f"{must}, got {len(text):,} characters")
            text = text[-most_chars:]
        return text, not goes_through


def check_template(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError if chats are wanted of a tokenizer without a template for them."""
    if data.chat and not tokenizer.has_chat_template:
        must = f"data.chat must be false for a tokenizer without a chat template{OWN_TEMPLATE}"
        raise ValueError(f"{must}, got true with {tokenizer.folder}")


def located(place: str | Path | None, number: int, error: ValueError) -> ValueError:
    """Return the error of a row, with its place."""
    return ValueError(f"{error}" if place is None else f"{place}:{number}: {error}")


def make_prompt(
    question: str | Mapping[str, Any] | Sequence[Any],
    number: int,
    config: DataConfig,
    tokenizer: Tokenizer,
    tools: Tools = no_tools,
) -> Prompt:
    """Return a prompt of the caller's own: a text or the messages of a chat, a data row that holds
    one, or token ids, which are taken as they are. Raises ValueError as for a line of a file."""
    if not isinstance(question, str | Mapping | Sequence):
        must = "a question must be a text, a row, messages or token ids"
        raise ValueError(f"{must}, got {question!r:.60}")
    rules = PromptRules(data=config, tokenizer=tokenizer, tools=tools)
    if isinstance(question, Mapping):
        return rules.make(question, number)
    if isinstance(question, str) or not all(isinstance(each, Integral) for each in question):
        return rules.make({config.prompt_field: question}, number)
    token_ids = tuple(map(int, question))
    if not token_ids or not all(0 <= each < tokenizer.num_ids for each in token_ids):
        got = shorten_value(token_ids)
        raise ValueError(f"token ids must be 0 to {tokenizer.num_ids - 1}, got {got}")
    return Prompt(prompt_id=number, text=tokenizer.decode(token_ids), token_ids=token_ids)


def question_of(row: Mapping[str, Any], config: DataConfig) -> Any:
    """Return the row's value of `config.prompt_field`. Raises ValueError if there is none."""
    try:
        return value_at(row, config.prompt_field)
    except KeyError:
        must = f"the row must have the field {config.prompt_field!r} (data.prompt_field)"
        got = ", ".join(map(repr, row)) or "no field at all"
        raise ValueError(f"{must}, got {got}") from None


def is_chat(prompt: Prompt, config: DataConfig) -> bool:
    """Return whether the prompt went through the chat template."""
    return config.chat or isinstance(prompt.fields.get(config.prompt_field), list)


def messages_of(row: Mapping[str, Any], config: DataConfig) -> list[dict[str, Any]]:
    """Return the chat that a row's question, a text or messages, begins. Raises ValueError for
    anything else."""
    field, question = config.prompt_field, question_of(row, config)
    if not isinstance(question, list):
        question = [{"role": "user", "content": text_of(question, field)}]
    messages = read_messages(question, field)
    if config.system is None:
        return messages
    if messages[0]["role"] == "system":
        must = "the messages must not start with a system message when data.system is set"
        raise ValueError(f"{must}, got both")
    return [{"role": "system", "content": config.system}, *messages]


def text_of(question: object, field: str) -> str:
    """Return the text of a field. Raises ValueError unless it is text that is not blank."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{field!r} must be text that is not blank, got {shorten_value(question)}")
    return question
