"""A request of a program and the model's reply to it, in one form whatever the API is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
Message = dict[str, Any]
"""A chat message as chat templates take it: its content is one text, the arguments of its calls are
objects."""
ID_CHARS = 16  # of a reply, at the end of the id that a response has
TOO_LONG = "context_length_exceeded"
"""The code by which clients recognise a full context."""


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
    """A request for a turn: the whole conversation, and the schemas of tools; `is_repeated`: the
    client says that it has sent it before."""

    messages: list[Message]
    schemas: list[Body]
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of the model: its text, and its calls as (name, arguments). `is_cut` says that a
    limit ended it; `num_prompt_tokens` came before its `num_tokens`."""

    text: str
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    is_cut: bool = False
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    reply_id: str = field(default_factory=lambda: secrets.token_hex(ID_CHARS // 2))

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
