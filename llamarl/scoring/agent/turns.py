"""A request of a program and the model's reply to it, in one form whatever the API is."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.core.groups import END_OF_THOUGHT, THOUGHT
from llamarl.core.records import TurnOptions

Body = dict[str, Any]
Message = dict[str, Any]
"""A chat message as chat templates take it: its content is one text, the arguments of its calls are
objects."""
ID_CHARS = 16  # of a reply, at the end of the id that a response has
TOO_LONG = "context_length_exceeded"
"""The code by which clients recognise a full context."""


def new_id() -> str:
    """Return the id of a reply."""
    return secrets.token_hex(ID_CHARS // 2)


class Thinking:
    """Splits a text that comes in pieces into the model's thinking, which it begins with or begins
    in, and the rest."""

    def __init__(self, *, begins_in_thought: bool) -> None:
        self._is_open = begins_in_thought  # in its thinking
        self._is_begun = begins_in_thought  # whether it begins with thinking is known
        self._strips = False  # white space at the beginning of this part
        self._held = ""  # what may belong to a mark

    def split(self, text: str, *, is_last: bool = False) -> list[tuple[bool, str]]:
        """Return the pieces of text that are sure by now: (whether it is thinking, the text)."""
        text = self._held + text
        self._held = ""
        if not self._is_begun:
            start = text.lstrip()
            self._is_open = start.startswith(THOUGHT)
            if not self._is_open and THOUGHT.startswith(start) and not is_last:
                self._held = text
                return []
            self._is_begun, self._strips = True, self._is_open
            text = start.removeprefix(THOUGHT) if self._is_open else text
        if not self._is_open:
            return self._part(text)
        thought, end, rest = text.partition(END_OF_THOUGHT)
        if not end and not is_last:
            sizes = range(min(len(text), len(END_OF_THOUGHT)), 0, -1)
            size = next((n for n in sizes if text.endswith(END_OF_THOUGHT[:n])), 0)
            thought, self._held = text[: len(text) - size], text[len(text) - size :]
        found = self._part(thought)
        if end:
            self._is_open, self._strips = False, True
            found += self._part(rest)
        return found

    def _part(self, text: str) -> list[tuple[bool, str]]:
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return [(self._is_open, text)] if text else []


def split_thought(text: str, *, begins_in_thought: bool) -> tuple[str, str]:
    """Return the thinking in the beginning of a text, without its marks, and the rest."""
    pieces = Thinking(begins_in_thought=begins_in_thought).split(text, is_last=True)
    thought, rest = ("".join(t for is_thinking, t in pieces if is_thinking == k) for k in (1, 0))
    return thought.strip(), rest


class Refused(Exception):  # noqa: N818 - what became of a request
    """A request that is answered with an error: `status` is the HTTP status, `code` the API's short
    word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def invalid(message: str) -> Refused:
    """Return the error of a request that cannot be served."""
    return Refused(400, "invalid_request", message)


def too_long(message: str) -> Refused:
    """Return the error of a request for which there are no tokens or turns left."""
    why = f"the conversation has reached its maximum context length: {message}"
    return Refused(400, TOO_LONG, why)


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for a turn: the whole conversation, the schemas of tools, and the options of the
    turn; `is_repeated`: the client says that it has sent it before."""

    messages: list[Message]
    schemas: list[Body]
    options: TurnOptions = field(default_factory=TurnOptions)
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of the model: its text, and its calls as (name, arguments). `is_cut` says that a
    limit ended it, `stopped_by` a text of the request's; `begins_in_thought` that it thinks from
    its first word on. `num_prompt_tokens` came before its `num_tokens`, of which `logprobs` has the
    texts and log-probs if they were asked for."""

    text: str
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    is_cut: bool = False
    stopped_by: str = ""
    begins_in_thought: bool = False
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    logprobs: Sequence[tuple[str, float]] = ()
    reply_id: str = field(default_factory=new_id)

    @property
    def thought(self) -> str:
        """What the model thought before it answered."""
        return split_thought(self.text, begins_in_thought=self.begins_in_thought)[0]

    @property
    def answer(self) -> str:
        """The text without thinking."""
        return split_thought(self.text, begins_in_thought=self.begins_in_thought)[1]

    def message(self) -> Message:
        """Return it as a chat message."""
        calls = [
            {
                "id": f"call_{self.reply_id}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(self.calls)
        ]
        found: Message = {"role": "assistant", "content": self.text}
        return found | ({"tool_calls": calls} if calls else {})


@dataclass(slots=True, eq=False)
class Begun:
    """A turn while the model writes it: the id of the reply, its text so far, and an event for each
    piece of it."""

    reply_id: str = field(default_factory=new_id)
    text: str = ""
    begins_in_thought: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Asked:
    """A request that the model answers: the turn as it begins, and the `reply` in the end."""

    begun: Begun
    reply: asyncio.Future[Reply]

    async def texts(self) -> AsyncIterator[str]:
        """Yield the pieces of the turn's text that come before its end."""
        num_chars = 0
        while not self.reply.done():
            self.begun.news.clear()
            if new := self.begun.text[num_chars:]:
                num_chars += len(new)
                yield new
                continue
            waiting = asyncio.ensure_future(self.begun.news.wait())
            either: set[asyncio.Future[Any]] = {waiting, self.reply}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()


def with_tool_name(message: Message, messages: Sequence[Message]) -> Message:
    """Return a tool's message with the name of the tool, which some chat templates show."""
    if message["role"] != "tool" or "name" in message:
        return message
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    names = [c["function"]["name"] for c in calls if c["id"] == message.get("tool_call_id")]
    return {**message, "name": names[-1]} if names else message


def encode(value: Body) -> bytes:
    """Return the value as JSON."""
    return json.dumps(value).encode()


def text_of(content: object, kinds: Sequence[str] = ("text",)) -> str:
    """Return the content of a message as one text. Raises Refused if it holds anything but parts of
    these kinds."""
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type", "text") in kinds else 0
            for part in content
        ]
        whole = [text for text in texts if isinstance(text, str)]
        content = "".join(whole) if len(whole) == len(texts) else content
    if not isinstance(content, str | None):
        raise invalid(f"the content of a message must be text, got {content!r:.80}")
    return content or ""


def call_of(name: object, arguments: object, call_id: object) -> Body:
    """Return a call of the model as chat templates take it. Raises Refused if its arguments are no
    object, as text or as it is."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or not isinstance(name, str):
        got = f"{name!r:.40}({arguments!r:.60})"
        raise invalid(f"a tool call must be a function with arguments, got {got}")
    return {"id": str(call_id), "type": "function", "function": {"name": name, "arguments": parsed}}


def schema_of(name: object, description: object, parameters: object) -> Body:
    """Return a tool as chat templates take it."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def limit_of(body: Body, *keys: str) -> int:
    """Return the most tokens that a request asks for, by the first of these keys that it has; 0 if
    it has none. Raises Refused if that is no number above 0."""
    key = next((key for key in keys if body.get(key) is not None), "")
    value = body[key] if key else 0
    if not isinstance(value, int) or isinstance(value, bool) or value < bool(key):
        raise invalid(f"{key} must be a whole number above 0, got {value!r:.80}")
    return value


def stops_of(body: Body, key: str) -> tuple[str, ...]:
    """Return the texts that are to end the turn. Raises Refused if they are none."""
    value = body.get(key)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise invalid(f"{key} must be texts, got {value!r:.80}")
    return tuple(texts)


def event(data: Body, name: str = "") -> bytes:
    """Return a server-sent event with this data as JSON."""
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + encode(data) + b"\n\n"
