"""OpenAI's responses, as far as command-line agents use them: the reading of requests, and the
writing of responses. Every request must hold the whole conversation."""

from __future__ import annotations

import json
import time
from typing import Any

from llamarl.core.groups import wrong_schemas
from llamarl.core.records import TurnOptions
from llamarl.scoring.agent.chat_completions import error
from llamarl.scoring.agent.turns import (
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
    text_of,
)

__all__ = ["ROUTE", "Stream", "error", "read", "respond"]
ROUTE = "responses"
UNSUPPORTED = {  # what the policy cannot do, by key: the values that ask for nothing
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "tool_choice": ("auto",),
}
TEXTS = ("input_text", "output_text", "text")
IN_SPACE = "__"  # between the name of a namespace and that of a tool in it
FREE = "input"  # the argument of a tool that takes any text
FREE_SCHEMA = {"type": "object", "properties": {FREE: {"type": "string"}}, "required": [FREE]}


def read(body: Body) -> AgentRequest:
    """Return the request in the body of a response request. Raises Refused if it asks for anything
    that cannot be served."""
    for key, allowed in UNSUPPORTED.items():
        if (value := body.get(key)) is not None and value not in allowed:
            raise invalid(f"{key} must be left out, got {value!r:.80}")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid(f"input must be a text or a list, got {given!r:.80}")
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": text_of(instructions)})
    for item in given:
        _add(item, messages)
    schemas = [each for tool in _tools(body) if (each := _schema(tool))]
    if must := wrong_schemas(schemas):
        raise invalid(f"tools must {must}")
    options = TurnOptions(
        max_tokens=limit_of(body, "max_output_tokens"), streams=bool(body.get("stream"))
    )
    return AgentRequest(messages, schemas, options)


def _tools(body: Body) -> list[Body]:
    """Return the tools of a request. Those in a namespace have its name before their own."""
    found: list[Body] = []
    for tool in body.get("tools") or ():
        if not isinstance(tool, dict):
            raise invalid(f"tools must be objects, got {tool!r:.80}")
        if tool.get("type") != "namespace":
            found.append(tool)
            continue
        space, own = tool.get("name"), tool.get("tools") or []
        if not isinstance(own, list) or not all(isinstance(each, dict) for each in own):
            raise invalid(f"tools of a namespace must be objects, got {own!r:.80}")
        found += [{**each, "name": _whole_name(space, each.get("name"))} for each in own]
    return found


def _whole_name(space: object, name: object) -> object:
    """Return the name by which the model knows a tool in a namespace, or in none."""
    return f"{space}{IN_SPACE}{name}" if space else name


def _schema(tool: Body) -> Body | None:
    """Return a tool as chat templates take it; None for tools that the provider runs, which cannot
    be offered to this model."""
    if tool.get("type") == "custom":
        return schema_of(tool.get("name"), tool.get("description"), FREE_SCHEMA)
    if tool.get("type") != "function":
        return None
    return schema_of(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _add(item: object, messages: list[Message]) -> None:
    """Add an item of a conversation to its messages. Calls belong to the message of the model
    before them, and its thinking is left out."""
    if not isinstance(item, dict):
        raise invalid(f"an item of input must be an object, got {item!r:.80}")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str):
            raise invalid(f"a message must have a role, got {item!r:.80}")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": text_of(content, TEXTS)})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {FREE: item.get("input")}
        name = _whole_name(item.get("namespace"), item.get("name"))
        call = call_of(name, arguments, item.get("call_id"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        told = text_of(item.get("output"), TEXTS)
        call_id = str(item.get("call_id"))
        messages.append({"role": "tool", "content": told, "tool_call_id": call_id})
    else:
        raise invalid(f"the type of an item must be message or function_call, got {kind!r:.80}")


def respond(reply: Reply, body: Body, model: str) -> Body:
    """Return the body of the response to a response request."""
    output: list[Body] = []
    if reply.thought:
        output.append(_reasoning(reply.reply_id, reply.thought))
    if reply.answer or not (reply.calls or reply.thought):
        output.append(_message(reply.reply_id, reply.answer))
    output += _calls(reply, body)
    return _made(reply.reply_id, body, model) | _ended(reply) | {"output": output}


class Stream:
    """The server-sent events of a streamed response."""

    def __init__(self, reply_id: str, body: Body, model: str, begins_in_thought: bool) -> None:
        self._id, self._body = reply_id, body
        self._made = _made(reply_id, body, model)
        self._thinking, self._num_chars = Thinking(begins_in_thought=begins_in_thought), 0
        self._open: tuple[str, str] | None = None  # the kind of the item that is open, its text
        self._output: list[Body] = []
        self._num_events = 0

    def begin(self) -> bytes:
        """Return the first events."""
        started = {"response": self._made | {"status": "in_progress"}}
        return self._event("created", started) + self._event("in_progress", started)

    def text(self, text: str, *, is_last: bool = False) -> bytes:
        """Return the events for a piece of text."""
        self._num_chars += len(text)
        pieces = self._thinking.split(text, is_last=is_last)
        return b"".join(self._piece("reasoning" if t else "message", piece) for t, piece in pieces)

    def end(self, reply: Reply) -> bytes:
        """Return the events for what is left of the reply, and the end."""
        found = self.text(reply.text[self._num_chars :], is_last=True) + self._close()
        for call in _calls(reply, self._body):
            place = {"output_index": len(self._output), "item_id": call["id"]}
            is_function = call["type"] == "function_call"
            key, kind = ("arguments", "function_call_arguments") if is_function else (FREE, "")
            kind = kind or "custom_tool_call_input"
            begun = {**call, key: "", "status": "in_progress"}
            found += self._item("added", begun)
            found += self._event(f"{kind}.delta", {**place, "delta": call[key]})
            found += self._event(f"{kind}.done", {**place, key: call[key]})
            found += self._item("done", call)
            self._output.append(call)
        ended = self._made | _ended(reply) | {"output": self._output}
        return found + self._event(
            "incomplete" if reply.is_cut else "completed", {"response": ended}
        )

    def _piece(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        found = b""
        if self._open is None or self._open[0] != kind:
            found = self._close()
            self._open = kind, ""
            make = _reasoning if kind == "reasoning" else _message
            found += self._item("added", make(self._id, "") | {"content": []})
            if kind == "message":
                part = _part("")
                found += self._event("content_part.added", {**self._place(), "part": part})
        self._open = kind, self._open[1] + text
        name = "output_text.delta" if kind == "message" else "reasoning_text.delta"
        more: Body = {"logprobs": []} if kind == "message" else {}
        return found + self._event(name, {**self._place(), "delta": text, **more})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open
        place, found = self._place(), b""
        if kind == "message":
            found += self._event("output_text.done", {**place, "text": text, "logprobs": []})
            found += self._event("content_part.done", {**place, "part": _part(text)})
        else:
            found += self._event("reasoning_text.done", {**place, "text": text})
        item = (_reasoning if kind == "reasoning" else _message)(self._id, text)
        found += self._item("done", item)
        self._open = None
        self._output.append(item)
        return found

    def _place(self) -> Body:
        assert self._open is not None
        item_id = f"{'rs' if self._open[0] == 'reasoning' else 'msg'}_{self._id}"
        return {"output_index": len(self._output), "item_id": item_id, "content_index": 0}

    def _item(self, what: str, item: Body) -> bytes:
        return self._event(f"output_item.{what}", {"output_index": len(self._output), "item": item})

    def _event(self, name: str, data: Body) -> bytes:
        kind = f"response.{name}"
        found = event({"type": kind, "sequence_number": self._num_events, **data}, kind)
        self._num_events += 1
        return found


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(reply_id: str, text: str) -> Body:
    found = {"type": "message", "id": f"msg_{reply_id}", "role": "assistant"}
    return found | {"status": "completed", "content": [_part(text)]}


def _reasoning(reply_id: str, text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{reply_id}", "summary": [], "content": content}


def _calls(reply: Reply, body: Body) -> list[Body]:
    """Return the calls as items, those of tools that take any text as such."""
    free = {tool.get("name") for tool in _tools(body) if tool.get("type") == "custom"}
    spaces = [tool for tool in body.get("tools") or () if tool.get("type") == "namespace"]
    places: dict[object, Body] = {
        _whole_name(space.get("name"), tool.get("name")): {
            "namespace": space.get("name"),
            "name": tool.get("name"),
        }
        for space in spaces
        for tool in space.get("tools") or ()
    }
    found: list[Body] = []
    for place, call in enumerate(reply.message().get("tool_calls", ())):
        function = call["function"]
        item = {"id": f"fc_{reply.reply_id}_{place}", "call_id": call["id"], "status": "completed"}
        item |= places.get(function["name"], {"name": function["name"]})
        if function["name"] in free:
            text = str(function["arguments"].get(FREE, ""))
            found.append({"type": "custom_tool_call", **item, FREE: text})
        else:
            arguments = json.dumps(function["arguments"])
            found.append({"type": "function_call", **item, "arguments": arguments})
    return found


def _made(reply_id: str, body: Body, model: str) -> Body:
    given: dict[str, Any] = {key: body.get(key) for key in ("instructions", "reasoning", "text")}
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "store": False,
        "usage": None,
        **{key: value for key, value in given.items() if value is not None},
    }


def _ended(reply: Reply) -> Body:
    why = {"reason": "max_output_tokens"} if reply.is_cut else None
    usage = {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
    status = "incomplete" if reply.is_cut else "completed"
    return {"status": status, "incomplete_details": why, "usage": usage}
