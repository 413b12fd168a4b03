"""A server as OpenAI's API has one, on this machine's loopback interface only.

    POST {url}/chat/completions     one message of the model
    GET  {url}/models               its only name

Owns: HTTP, the JSON of both, and which conversation a request belongs to, which its URL says by a
secret of its own. Does not own: who writes the message (`agent.py`). Invariant: it listens on
127.0.0.1 alone, at a port that the system chooses; without the secret of a conversation that is
open, a request gets nothing but an error.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import h11

HOST = "127.0.0.1"
MODEL = "policy"
SECRET_BYTES = 16
MAX_BODY_BYTES = 64 * 2**20
READ_BYTES = 65536
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's own client: above 0 in a repeated request
JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"
Body = dict[str, Any]


class Refused(Exception):  # noqa: N818 - what became of a request
    """A request that gets an error: its HTTP status, and the API's short word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of the model: its text and its calls as (name, arguments)."""

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    reply_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def message(self) -> Body:
        """As the API writes it."""
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


Answer = Callable[[Body, bool], Awaitable[Reply]]
"""(the body of a request for a message, whether the client repeats it) -> the message. May raise
Refused."""


class ChatServer:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None

    async def open(self, answer: Answer) -> tuple[str, str]:
        """Begin a conversation: its secret, and the URL that a client takes as its base."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, HOST, 0)
        secret = secrets.token_hex(SECRET_BYTES)
        self._answers[secret] = answer
        port = self._server.sockets[0].getsockname()[1]
        return secret, f"http://{HOST}:{port}/{secret}/v1"

    def close(self, secret: str) -> None:
        """End a conversation: further requests get an error."""
        self._answers.pop(secret, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with one request after the other."""
        connection = h11.Connection(h11.SERVER)
        with closing(writer), suppress(ConnectionError, h11.RemoteProtocolError):
            while (found := await _receive(connection, reader)) is not None:
                status, kind, data = await self._respond(*found)
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

    async def _respond(self, request: h11.Request, body: bytes | None) -> tuple[int, str, bytes]:
        """(status, type, content) of an answer."""
        try:
            if body is None:
                raise Refused(413, "too_large", f"a body must have at most {MAX_BODY_BYTES} bytes")
            secret, _, route = request.target.decode("ascii").strip("/").partition("/v1/")
            answer = self._answers.get(secret)
            method = request.method.decode("ascii")
            if answer is None:
                raise Refused(404, "not_found", "the episode of this URL is not played (any more)")
            if (method, route) == ("GET", "models"):
                model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llamarl"}
                return 200, JSON_TYPE, _encode({"object": "list", "data": [model]})
            if (method, route) != ("POST", "chat/completions"):
                known = "POST chat/completions and GET models"
                raise Refused(404, "not_found", f"a request must be {known}, got {method} {route}")
            headers = {name.decode("ascii"): value for name, value in request.headers}
            is_repeated = headers.get(RETRY_HEADER, b"0") != b"0"
            asked = _parse(body)
            reply = await answer(asked, is_repeated)
        except Refused as error:
            said = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return error.status, JSON_TYPE, _encode({"error": {**said, "param": None}})
        if asked.get("stream"):
            return 200, EVENT_TYPE, _events(reply, asked)
        message = {"index": 0, "message": reply.message(), "logprobs": None}
        choices = [{**message, "finish_reason": _finish_reason(reply)}]
        return 200, JSON_TYPE, _encode(_completion(reply, "chat.completion", choices))


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes | None] | None:
    """The next request and its body, None in place of one that is too large; None at the end."""
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


def _parse(body: bytes) -> Body:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(400, "invalid_json", "the body must be a JSON object")
    return found


def _encode(value: Body) -> bytes:
    return json.dumps(value).encode()


def _completion(reply: Reply, kind: str, choices: list[Body]) -> Body:
    made = {"id": f"chatcmpl-{reply.reply_id}", "object": kind, "created": int(time.time())}
    return {**made, "model": MODEL, "choices": choices, "usage": None}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"


def _events(reply: Reply, asked: Body) -> bytes:
    """A stream that has the whole message in one event."""
    message = reply.message()
    for place, call in enumerate(message.get("tool_calls", ())):
        call["index"] = place
    steps: list[tuple[Body, str | None]] = [(message, None), ({}, _finish_reason(reply))]
    choices = [[{"index": 0, "delta": delta, "finish_reason": why}] for delta, why in steps]
    options = asked.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        choices.append([])
    chunks = [_encode(_completion(reply, "chat.completion.chunk", each)) for each in choices]
    return b"".join(b"data: " + chunk + b"\n\n" for chunk in [*chunks, b"[DONE]"])
