"""Episodes that a program of the recipe's own plays, as a client of an OpenAI-compatible server
on this machine's loopback interface."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import h11

from llamarl.core.errors import mark_seen
from llamarl.core.groups import END_OF_THOUGHT, Opening, wrong_schemas
from llamarl.scoring.user_code.calls import Raised, Runner

HOST = "127.0.0.1"
MODEL = "policy"
SECRET_BYTES = 16
MAX_BODY_BYTES = 64 * 2**20
READ_BYTES = 65536
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's own client: above 0 in a repeated request
JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"
MAX_THREADS = 1024  # programs that are no coroutines, and run at once
Body = dict[str, Any]
Message = dict[str, Any]


class Refused(Exception):  # noqa: N818 - what became of a request
    """A request that is answered with an error: `status` is the HTTP status, `code` the API's short
    word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of the model: its text, and its tool calls as (name, arguments)."""

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    reply_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def message(self) -> Body:
        """Return this message in the form of chat completions."""
        calls = [
            {
                "id": f"call_{self.reply_id}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for place, (name, arguments) in enumerate(self.calls)
        ]
        content = self.text if self.text or not calls else None
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Server] = WeakKeyDictionary()
_played: dict[str, AgentEnvironment] = {}  # by the secret in the URL of its server
runner = Runner(MAX_THREADS, "agent")
"""Runs all programs in this process."""


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection, request after request."""
    connection = h11.Connection(h11.SERVER)
    with closing(writer), suppress(ConnectionError, h11.RemoteProtocolError):
        while (found := await _receive(connection, reader)) is not None:
            status, kind, data = await _respond(*found)
            headers = [("Content-Type", kind), ("Content-Length", str(len(data)))]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=data),
                h11.EndOfMessage(),
            ):
                writer.write(connection.send(event) or b"")
            await writer.drain()
            if connection.our_state is not h11.DONE or status == 413:
                break
            connection.start_next_cycle()


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes | None] | None:
    """Return the next request and its body, or None for the body if it is too large; None once the
    client has closed the connection."""
    request, parts, num_bytes = None, [], 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            num_bytes += len(event.data)
            if num_bytes > MAX_BODY_BYTES:
                assert request is not None
                return request, None
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, b"".join(parts)
        else:  # the client has closed the connection
            return None


async def _respond(request: h11.Request, data: bytes | None) -> tuple[int, str, bytes]:
    """Return the status, content type and body that answer a request."""
    try:
        if data is None:
            raise Refused(413, "too_large", f"a body must have at most {MAX_BODY_BYTES} bytes")
        secret, _, route = request.target.decode("ascii").strip("/").partition("/v1/")
        method = request.method.decode("ascii")
        if (environment := _played.get(secret)) is None:
            raise Refused(404, "not_found", "the episode of this URL is not played (any more)")
        if (method, route) == ("GET", "models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llamarl"}
            return 200, JSON_TYPE, _encode({"object": "list", "data": [model]})
        if method != "POST" or route not in PROTOCOLS:
            known = "POST chat/completions and GET models"
            raise Refused(404, "not_found", f"a request must be {known}, got {method} {route}")
        headers = {name.decode("ascii"): value for name, value in request.headers}
        is_repeated = headers.get(RETRY_HEADER, b"0") != b"0"
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Refused(400, "invalid_json", "the body must be a JSON object")
        read, respond = PROTOCOLS[route]
        return 200, *respond(await environment.answer(*read(body), is_repeated), body)
    except Refused as error:
        said = {"message": str(error), "type": "invalid_request_error", "code": error.code}
        return error.status, JSON_TYPE, _encode({"error": {**said, "param": None}})


def _encode(value: Body) -> bytes:
    return json.dumps(value).encode()


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
            raise _wrong(f"{key} must be left out, got {value!r:.80}")
    if not isinstance(given := body.get("messages"), list):
        raise _wrong(f"messages must be a list, got {given!r:.80}")
    messages = [*map(_normal, given)]
    schemas = [] if body.get("tools") is None else body["tools"]
    if must := wrong_schemas(schemas):  # which chat templates cannot show
        raise _wrong(f"tools must {must}")
    return messages, schemas


def _normal(message: object) -> Message:
    """Return a message in the form that chat templates take: its content as one text, the arguments
    of calls as objects. Raises Refused if it holds anything but text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(f"a message must have a role, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        whole = [text for text in texts if isinstance(text, str)]
        content = "".join(whole) if len(whole) == len(texts) else content
    if not isinstance(content, str | None):
        raise _wrong(f"the content of a message must be text, got {content!r:.80}")
    found: Message = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise _wrong(f"tool_calls must be a list, got {calls!r:.80}")
        found["tool_calls"] = [_normal_call(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if value := message.get(key):
            if not isinstance(value, str):
                raise _wrong(f"{key} of a message must be text, got {value!r:.80}")
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
        raise _wrong(f"a tool call must be a function with arguments, got {call!r:.80}") from error


def respond_chat(reply: Reply, body: Body) -> tuple[str, bytes]:
    """Return the content type and body of the answer to a chat completion request: one object, or
    a stream of server-sent events, of which one has the whole message."""
    made = {"id": f"chatcmpl-{reply.reply_id}", "created": int(time.time())}
    made |= {"model": MODEL, "usage": None}
    message, why = reply.message(), "tool_calls" if reply.calls else "stop"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": why}
        return JSON_TYPE, _encode({**made, "object": "chat.completion", "choices": [choice]})
    for place, call in enumerate(message.get("tool_calls", ())):
        call["index"] = place
    steps: list[tuple[Body, str | None]] = [(message, None), ({}, why)]
    choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in steps]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        choices.append([])
    made["object"] = "chat.completion.chunk"
    chunks = [_encode({**made, "choices": each}) for each in choices]
    return EVENT_TYPE, b"".join(b"data: " + chunk + b"\n\n" for chunk in [*chunks, b"[DONE]"])


Protocol = tuple[
    Callable[[Body], tuple[list[Message], list[Body]]],
    Callable[[Reply, Body], tuple[str, bytes]],
]
"""An API, as two functions: (body of a request) -> its messages and schemas, which may raise
Refused, and (the model's message, body of the request) -> content type and body of the response."""
PROTOCOLS: dict[str, Protocol] = {"chat/completions": (read_chat, respond_chat)}
"""The protocols by the routes at which they are spoken."""


class AgentEnvironment:
    """An environment whose episode is played by a program that asks for the model's turns. A
    subclass defines `play`."""

    def __init__(self) -> None:
        self._conversation: list[Message] = []  # as the program knows it
        self._schemas: list[Body] = []
        self._arrived: asyncio.Future[list[Message]] | None = None  # messages that are new
        self._reply: asyncio.Future[Reply] | None = None  # of the request that waits
        self._playing: asyncio.Task[Any] | None = None
        self._secret = ""
        self._is_over = False

    def play(self, url: str, **row: Any) -> Any:
        """Play an episode of this prompt's row with the model served at `url`, and return its
        reward. It may be a coroutine; a plain function runs in a thread."""
        raise NotImplementedError("an AgentEnvironment must have play(url, **row)")

    async def reset(self, /, **row: Any) -> Opening:
        """Start the program, and return its first request as the prompt."""
        loop = asyncio.get_running_loop()
        if loop not in _servers:
            _servers[loop] = await asyncio.start_server(_serve, HOST, 0)
        self._conversation, self._schemas, self._reply = [], [], None
        self._arrived, self._is_over = loop.create_future(), False
        self._secret = secrets.token_hex(SECRET_BYTES)
        _played[self._secret] = self
        port = _servers[loop].sockets[0].getsockname()[1]
        url = f"http://{HOST}:{port}/{self._secret}/v1"
        self._playing = loop.create_task(runner.run(self.play, url, **row))
        self._playing.add_done_callback(mark_seen)
        messages = await self._next()
        if messages is None:
            raise RuntimeError("play must ask for at least one message, it has asked for none")
        return Opening(messages, self._schemas)

    async def step(self, messages: list[Message]) -> list[Message] | None:
        """Give the model's turn to the program, and return the messages that it adds with its next
        request; None once it has ended."""
        written = messages[-1]
        calls = [each["function"] for each in written.get("tool_calls", ())]
        reply = Reply(
            written["content"], tuple((call["name"], call["arguments"]) for call in calls)
        )
        assert self._reply is not None, "a turn follows a request"
        self._arrived = asyncio.get_running_loop().create_future()
        self._conversation.append(_normal(reply.message()))
        self._reply.set_result(reply)
        return await self._next()

    async def get_reward(self) -> float:
        """Return the program's reward. If a limit has cut the episode, the program's open request
        fails first; should the program then raise, the reward is 0, as the model has used up its
        tokens."""
        assert self._playing is not None, "an episode is reset first"
        was_cut = not self._playing.done()
        self._refuse_requests()
        try:
            return await self._playing
        except Raised as error:
            failure = error.error
        finally:
            _played.pop(self._secret, None)
        if was_cut:
            return 0.0
        raise failure

    def abandon(self) -> None:
        """End the program and its open request, because the episode does not go on."""
        if self._playing is not None:
            self._playing.cancel()
        self._refuse_requests()
        _played.pop(self._secret, None)

    def _refuse_requests(self) -> None:
        """Refuse the request that waits, and all further ones."""
        self._is_over = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(_over())
            self._reply.exception()  # it may be that nothing waits for it

    async def _next(self) -> list[Message] | None:
        """Return the messages of the program's next request, or None once it has ended. Raises what
        the program raised. If this is cancelled, the program is cancelled too, and its traceback
        says where it was."""
        assert self._playing is not None
        assert self._arrived is not None
        playing = self._playing
        try:
            await asyncio.wait({self._arrived, playing}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.abandon()
            await asyncio.wait({playing})
            if playing.cancelled():
                playing.result()
            raise
        if self._arrived.done():
            return self._arrived.result()
        try:
            self._playing.result()
        except Raised as error:
            raise error.error from None
        return None

    async def answer(
        self, messages: list[Message], schemas: list[Body], is_repeated: bool
    ) -> Reply:
        """Return the model's turn for a request with these messages and tools; `is_repeated`: the
        client says that it has sent it before. Raises Refused if it cannot be served."""
        if self._is_over:
            raise _over()
        assert self._arrived is not None
        is_asked = self._reply is not None and not self._reply.done()
        asked = self._conversation[: -1 if self._reply is not None and not is_asked else None]
        if self._reply is None or not (is_repeated and messages == asked):
            if is_asked or self._arrived.done():
                raise Refused(409, "busy", "one message of an episode is asked for at a time")
            self._check(messages, schemas)
            new = messages[len(self._conversation) :]
            self._conversation, self._schemas = messages, schemas
            self._reply = asyncio.get_running_loop().create_future()
            self._arrived.set_result([_named(each, messages) for each in new])
        return await asyncio.shield(self._reply)

    def _check(self, messages: Sequence[Message], schemas: list[Body]) -> None:
        """Raise Refused unless these messages continue the conversation."""
        known = self._conversation
        if not messages or messages[-1]["role"] == "assistant":
            raise _wrong("messages must end with one that is not the assistant's")
        if not known:
            return
        if schemas != self._schemas:
            raise _wrong("tools must stay those of the episode's first request")
        for place, (before, now) in enumerate(zip(known, messages, strict=False)):
            if not _is_same(before, now):
                raise _changed(f"message {place} of the conversation has changed")
        new = messages[len(known) :]
        if not new or any(each["role"] == "assistant" for each in new):
            raise _changed("messages must add observations to the conversation so far")


def _named(message: Message, messages: Sequence[Message]) -> Message:
    """Return a tool's message with the name of the tool, which some chat templates show."""
    if message["role"] != "tool" or "name" in message:
        return message
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    names = [c["function"]["name"] for c in calls if c["id"] == message.get("tool_call_id")]
    return {**message, "name": names[-1]} if names else message


def _is_same(before: Message, now: Message) -> bool:
    """Return whether both are the same message. White space around an assistant's message, and its
    thinking, may be missing from the second: the ids stay those that were generated."""
    if before["role"] != "assistant":
        return before == now
    texts = before["content"].strip(), before["content"].rpartition(END_OF_THOUGHT)[2].strip()
    same = [(each["role"], each.get("tool_calls")) for each in (before, now)]
    return same[0] == same[1] and now["content"].strip() in texts


def _wrong(message: str) -> Refused:
    return Refused(400, "invalid_request", message)


def _changed(message: str) -> Refused:
    must = "a request must go on with the episode's conversation, as it was"
    return Refused(400, "conversation_changed", f"{must}: {message}")


def _over() -> Refused:
    """Return the error of a request after a limit, in the words by which clients recognise a full
    context."""
    why = "the rollout has reached its maximum context length: its tokens or turns are used up"
    return Refused(400, "context_length_exceeded", why)
