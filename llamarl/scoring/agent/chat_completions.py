"""OpenAI's chat completions: the reading of requests, and the writing of responses."""

from __future__ import annotations

import json
import time

from llamarl.core.groups import wrong_schemas
from llamarl.scoring.agent.turns import Body, Message, Reply, encode, invalid

JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"

UNSUPPORTED = {  # what the policy cannot do, by key: the values that ask for nothing
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "functions": ([],),
}


def read_chat(body: Body) -> tuple[list[Message], list[Body]]:
    """Return the messages, and the schemas of tools, of the body of a chat completion request.
    Raises Refused if it asks for anything that cannot be served."""
    for key, allowed in UNSUPPORTED.items():
        if (value := body.get(key)) is not None and value not in allowed:
            raise invalid(f"{key} must be left out, got {value!r:.80}")
    if not isinstance(given := body.get("messages"), list):
        raise invalid(f"messages must be a list, got {given!r:.80}")
    messages = [*map(_normal, given)]
    schemas = [] if body.get("tools") is None else body["tools"]
    if must := wrong_schemas(schemas):  # which chat templates cannot show
        raise invalid(f"tools must {must}")
    return messages, schemas


def _normal(message: object) -> Message:
    """Return a message in the form that chat templates take: its content as one text, the arguments
    of calls as objects. Raises Refused if it holds anything but text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(f"a message must have a role, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        whole = [text for text in texts if isinstance(text, str)]
        content = "".join(whole) if len(whole) == len(texts) else content
    if not isinstance(content, str | None):
        raise invalid(f"the content of a message must be text, got {content!r:.80}")
    found: Message = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise invalid(f"tool_calls must be a list, got {calls!r:.80}")
        found["tool_calls"] = [_normal_call(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if value := message.get(key):
            if not isinstance(value, str):
                raise invalid(f"{key} of a message must be text, got {value!r:.80}")
            found[key] = value
    return found


def _normal_call(call: object) -> Body:
    try:
        function = call["function"]  # type: ignore[index]  # a TypeError says that it is none
        arguments = function["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            raise TypeError("no arguments by name")
        whole = {"name": str(function["name"]), "arguments": parsed}
        return {"id": str(call["id"]), "type": "function", "function": whole}  # type: ignore[index]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise invalid(f"a tool call must be a function with arguments, got {call!r:.80}") from error


def respond_chat(reply: Reply, body: Body, model: str) -> tuple[str, bytes]:
    """Return the content type and body of the answer to a chat completion request: one object, or
    a stream of server-sent events, of which one has the whole message."""
    made: Body = {"id": f"chatcmpl-{reply.reply_id}", "created": int(time.time()), "model": model}
    usage = {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
    message, why = _as_chat(reply), "tool_calls" if reply.calls else "stop"
    why = "length" if reply.is_cut else why
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": why}
        made |= {"object": "chat.completion", "choices": [choice], "usage": usage}
        return JSON_TYPE, encode(made)
    for place, call in enumerate(message.get("tool_calls", ())):
        call["index"] = place
    steps: list[tuple[Body, str | None]] = [(message, None), ({}, why)]
    choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in steps]
    made |= {"object": "chat.completion.chunk", "usage": None}
    chunks = [encode({**made, "choices": each}) for each in choices]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append(encode({**made, "choices": [], "usage": usage}))
    return EVENT_TYPE, b"".join(b"data: " + chunk + b"\n\n" for chunk in [*chunks, b"[DONE]"])


def _as_chat(reply: Reply) -> Message:
    """Return the reply as a message of this API, in which arguments are JSON."""
    message = reply.message()
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return {**message, "content": reply.text if reply.text or not reply.calls else None}
