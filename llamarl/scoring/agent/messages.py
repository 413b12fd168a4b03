"""Anthropic's messages: the reading of requests, and the writing of responses."""

from __future__ import annotations

import json
from typing import Any

from llamarl.core.groups import wrong_schemas
from llamarl.core.records import TurnOptions
from llamarl.scoring.agent.turns import (
    TOO_LONG,
    AgentRequest,
    Body,
    Message,
    Reply,
    Thinking,
    call_of,
    event,
    invalid,
    limit_of,
    schema_of,
    stops_of,
    text_of,
)

ROUTE, COUNT_ROUTE = "messages", "messages/count_tokens"
THINKING = ("thinking", "redacted_thinking")


def read(body: Body) -> AgentRequest:
    """Return the request in the body of a message request. Raises Refused if it asks for anything
    that cannot be served."""
    choice = body.get("tool_choice")
    if choice is not None and not (isinstance(choice, dict) and choice.get("type") == "auto"):
        raise invalid(f"tool_choice must be left out, got {choice!r:.80}")
    if not isinstance(given := body.get("messages"), list):
        raise invalid(f"messages must be a list, got {given!r:.80}")
    messages: list[Message] = []
    if system := text_of(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in given:
        messages += _messages(message)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"tools must be a list of tools, got {tools!r:.80}")
    # Tools of the provider's own, which have no schema, cannot be offered to this model.
    own = [tool for tool in tools if "input_schema" in tool]
    schemas = [schema_of(t.get("name"), t.get("description"), t["input_schema"]) for t in own]
    if must := wrong_schemas(schemas):
        raise invalid(f"tools must {must}")
    options = TurnOptions(
        max_tokens=limit_of(body, "max_tokens"),
        stop_strings=stops_of(body, "stop_sequences"),
        streams=bool(body.get("stream")),
    )
    return AgentRequest(messages, schemas, options)


def _messages(message: object) -> list[Message]:
    """Return a message of this API as those of chat templates, which have one for each result of a
    tool."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise invalid(f"a message must have a role, got {message!r:.80}")
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    blocks = [block for block in content if isinstance(block, dict)]
    if len(blocks) < len(content):
        raise invalid(f"the content of a message must be text or blocks, got {content!r:.80}")
    kinds = [block.get("type") for block in blocks]
    parts = [b for b, kind in zip(blocks, kinds, strict=True) if kind not in THINKING]
    texts = [part for part in parts if part.get("type") not in ("tool_use", "tool_result")]
    found: list[Message] = []
    for part in parts:
        if part.get("type") == "tool_result":
            told = text_of(part.get("content"))
            call_id = str(part.get("tool_use_id"))
            found.append({"role": "tool", "content": told, "tool_call_id": call_id})
    text = text_of(texts)
    calls = [
        call_of(part.get("name"), part.get("input"), part.get("id"))
        for part in parts
        if part.get("type") == "tool_use"
    ]
    if text or calls or not found:
        said: Message = {"role": role, "content": text}
        found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def respond(reply: Reply, body: Body, model: str) -> Body:
    """Return the body of the response to a message request."""
    blocks: list[Body] = []
    if reply.thought:
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
    if reply.answer or not (reply.calls or reply.thought):
        blocks.append({"type": "text", "text": reply.answer})
    blocks += _uses(reply)
    return _made(reply.reply_id, model) | {
        "content": blocks,
        "stop_reason": _finish(reply),
        "stop_sequence": reply.stopped_by or None,
        "usage": _usage(reply),
    }


class Stream:
    """The server-sent events of a streamed response."""

    def __init__(self, reply_id: str, body: Body, model: str, begins_in_thought: bool) -> None:
        self._made = _made(reply_id, model)
        self._thinking, self._num_chars = Thinking(begins_in_thought=begins_in_thought), 0
        self._kind = ""  # of the block that is open
        self._number = -1

    def begin(self) -> bytes:
        """Return the first events."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event({"type": "message_start", "message": self._made | empty})

    def text(self, text: str, *, is_last: bool = False) -> bytes:
        """Return the events for a piece of text."""
        self._num_chars += len(text)
        pieces = self._thinking.split(text, is_last=is_last)
        return b"".join(self._piece("thinking" if t else "text", piece) for t, piece in pieces)

    def end(self, reply: Reply) -> bytes:
        """Return the events for what is left of the reply, and the end."""
        found = self.text(reply.text[self._num_chars :], is_last=True) + self._close()
        for use in _uses(reply):
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(use["input"])}
            found += self._open("tool_use", {**use, "input": {}})
            found += self._delta(arguments) + self._close()
        ended = {"stop_reason": _finish(reply), "stop_sequence": reply.stopped_by or None}
        usage = _usage(reply)
        found += _event({"type": "message_delta", "delta": ended, "usage": usage})
        return found + _event({"type": "message_stop"})

    def _piece(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        found = b""
        if self._kind != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            found = self._close() + self._open(kind, {"type": kind, **empty})
        return found + self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, kind: str, block: Body) -> bytes:
        self._kind, self._number = kind, self._number + 1
        started = {"type": "content_block_start", "index": self._number, "content_block": block}
        return _event(started)

    def _delta(self, delta: Body) -> bytes:
        return _event({"type": "content_block_delta", "index": self._number, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event({"type": "content_block_stop", "index": self._number})


def error(code: str, message: str) -> Body:
    """Return the body of a response that refuses a request, in words by which clients recognise a
    full context."""
    said = f"prompt is too long: {message}" if code == TOO_LONG else message
    return {"type": "error", "error": {"type": "invalid_request_error", "message": said}}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _made(reply_id: str, model: str) -> Body:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}


def _finish(reply: Reply) -> str:
    if reply.is_cut:
        return "max_tokens"
    if reply.calls:
        return "tool_use"
    return "stop_sequence" if reply.stopped_by else "end_turn"


def _usage(reply: Reply) -> Body:
    return {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens}


def _uses(reply: Reply) -> list[Body]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in reply.message().get("tool_calls", ())
    ]
