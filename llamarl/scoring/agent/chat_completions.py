"""OpenAI's chat completions: the reading of requests, and the writing of responses."""

from __future__ import annotations

import json
import time

from llamarl.core.groups import wrong_schemas
from llamarl.core.records import TurnOptions
from llamarl.scoring.agent.turns import (
    AgentRequest,
    Body,
    Message,
    Reply,
    call_of,
    event,
    invalid,
    limit_of,
    stops_of,
    text_of,
)

ROUTE = "chat/completions"
UNSUPPORTED = {  # what the policy cannot do, by key: the values that ask for nothing
    "n": (1,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "functions": ([],),
}


def read(body: Body) -> AgentRequest:
    """Return the request in the body of a chat completion. Raises Refused if it asks for anything
    that cannot be served."""
    for key, allowed in UNSUPPORTED.items():
        if (value := body.get(key)) is not None and value not in allowed:
            raise invalid(f"{key} must be left out, got {value!r:.80}")
    if not isinstance(given := body.get("messages"), list):
        raise invalid(f"messages must be a list, got {given!r:.80}")
    messages = [*map(_message, given)]
    schemas = [] if body.get("tools") is None else body["tools"]
    if must := wrong_schemas(schemas):  # which chat templates cannot show
        raise invalid(f"tools must {must}")
    options = TurnOptions(
        max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
        stop_strings=stops_of(body, "stop"),
        streams=bool(body.get("stream")),
        has_logprobs=bool(body.get("logprobs")),
    )
    return AgentRequest(messages, schemas, options)


def _message(message: object) -> Message:
    """Return a message in the form that chat templates take. Raises Refused if it holds anything
    but text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(f"a message must have a role, got {message!r:.80}")
    found: Message = {"role": message["role"], "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise invalid(f"tool_calls must be a list, got {calls!r:.80}")
        found["tool_calls"] = [*map(_call, calls)]
    for key in ("name", "tool_call_id"):
        if value := message.get(key):
            if not isinstance(value, str):
                raise invalid(f"{key} of a message must be text, got {value!r:.80}")
            found[key] = value
    return found


def _call(call: object) -> Body:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or "id" not in call:
        raise invalid(f"a tool call must be a function with arguments, got {call!r:.80}")
    return call_of(function.get("name"), function.get("arguments"), call["id"])


def respond(reply: Reply, body: Body, model: str) -> Body:
    """Return the body of the response to a chat completion."""
    choice = {
        "index": 0,
        "message": _as_message(reply),
        "logprobs": _logprobs(reply) if body.get("logprobs") else None,
        "finish_reason": _finish(reply),
    }
    made = _made(reply.reply_id, model, "chat.completion")
    return made | {"choices": [choice], "usage": _usage(reply)}


class Stream:
    """The server-sent events of a streamed response."""

    def __init__(self, reply_id: str, body: Body, model: str, begins_in_thought: bool) -> None:
        self._body = body
        self._made = _made(reply_id, model, "chat.completion.chunk")
        self._num_chars = 0

    def begin(self) -> bytes:
        """Return the first events."""
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        """Return the events for a piece of text."""
        self._num_chars += len(text)
        return self._chunk({"content": text})

    def end(self, reply: Reply) -> bytes:
        """Return the events for what is left of the reply, and the end."""
        found = b""
        logprobs = _logprobs(reply) if self._body.get("logprobs") else None
        rest = reply.text[self._num_chars :]
        if rest or logprobs:
            found += self._chunk({"content": rest}, logprobs=logprobs)
        for place, call in enumerate(_as_message(reply).get("tool_calls", ())):
            found += self._chunk({"tool_calls": [{"index": place, **call}]})
        found += self._chunk({}, _finish(reply))
        options = self._body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            found += event({**self._made, "choices": [], "usage": _usage(reply)})
        return found + b"data: [DONE]\n\n"

    def _chunk(self, delta: Body, finish: str | None = None, logprobs: Body | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**self._made, "choices": [choice]})


def error(code: str, message: str) -> Body:
    """Return the body of a response that refuses a request."""
    said = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return {"error": said}


def _made(reply_id: str, model: str, kind: str) -> Body:
    made = {"id": f"chatcmpl-{reply_id}", "object": kind, "created": int(time.time())}
    return made | {"model": model}


def _finish(reply: Reply) -> str:
    if reply.is_cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> Body:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


def _logprobs(reply: Reply) -> Body:
    content = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in reply.logprobs
    ]
    return {"content": content, "refusal": None}


def _as_message(reply: Reply) -> Message:
    """Return the reply as a message of this API, in which arguments are JSON."""
    message = reply.message()
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return {**message, "content": reply.text if reply.text or not reply.calls else None}
