"""The server on this machine's loopback interface through which programs ask for turns of the
model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Protocol

import h11

from llamarl.scoring.agent import chat_completions, messages, responses
from llamarl.scoring.agent.messages import COUNT_ROUTE
from llamarl.scoring.agent.turns import AgentRequest, Asked, Body, Refused, encode

HOST = "127.0.0.1"
MODEL = "policy"
MAX_BODY_BYTES = 64 * 2**20
READ_BYTES = 65536
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's own client: above 0 in a repeated request
JSON_TYPE = "application/json"
EVENT_TYPE = "text/event-stream"
READ_S = 60.0  # between two parts of a request
PROTOCOLS: dict[str, ModuleType] = {
    each.ROUTE: each for each in (chat_completions, responses, messages)
}
"""The APIs by route, each a module with functions `read`, `respond` and `error`, and a class
`Stream`."""


class Answering(Protocol):
    """An episode that can be asked for turns."""

    def ask(self, request: AgentRequest) -> Asked:
        """Ask the model for a turn. Raises Refused if the request cannot be served."""

    async def count(self, request: AgentRequest) -> int:
        """Return the number of tokens of a request's messages."""

    def note_refused(self, error: Refused) -> None:
        """Note that a request was refused with this error."""


Played = Mapping[str, Answering]
"""The episodes that are played, by the secrets in their URLs."""


async def start_server(played: Played) -> asyncio.Server:
    """Serve these episodes at a free port."""
    return await asyncio.start_server(partial(_serve, played), HOST, 0)


def url_of(server: asyncio.Server, secret: str) -> str:
    """Return the address at which the episode with this secret is served."""
    return f"http://{HOST}:{server.sockets[0].getsockname()[1]}/{secret}/v1"


async def _serve(
    played: Played, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one connection, request after request."""
    connection = h11.Connection(h11.SERVER)
    gone = (ConnectionError, TimeoutError, h11.ProtocolError)
    with closing(writer), suppress(*gone):
        while (found := await _receive(connection, reader)) is not None:
            await _respond(played, *found, _Sending(connection, writer))
            if connection.our_state is not h11.DONE or found[1] is None:
                break
            connection.start_next_cycle()


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes | None] | None:
    """Return the next request and its body, or None for the body if it is too large; None once the
    client has closed the connection. Raises TimeoutError if a request that has begun does not go
    on."""
    request, parts, num_bytes = None, [], 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            has_begun = request is not None or connection.trailing_data[0]
            async with asyncio.timeout(READ_S if has_begun else None):
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


@dataclass(slots=True)
class _Sending:
    """The response to one request."""

    connection: h11.Connection
    writer: asyncio.StreamWriter

    async def whole(self, status: int, body: Body) -> None:
        """Send a whole response of JSON."""
        data = encode(body)
        await self.head(status, ("Content-Type", JSON_TYPE), ("Content-Length", str(len(data))))
        await self.part(data)
        await self._send(h11.EndOfMessage())

    async def head(self, status: int, *headers: tuple[str, str]) -> None:
        """Begin a response."""
        await self._send(h11.Response(status_code=status, headers=[*headers]))

    async def part(self, data: bytes) -> None:
        """Send a part of the body."""
        await self._send(h11.Data(data=data))

    async def end(self) -> None:
        """End a response that was begun without a length."""
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        self.writer.write(self.connection.send(event) or b"")
        await self.writer.drain()


async def _respond(
    played: Played, request: h11.Request, data: bytes | None, sending: _Sending
) -> None:
    """Send the response to a request."""
    path = request.target.decode("ascii").partition("?")[0]
    secret, _, route = path.strip("/").partition("/v1/")
    codec = PROTOCOLS.get(route.partition("/")[0] if route == COUNT_ROUTE else route)
    try:
        await _answer(played, request, data, sending, secret, route)
    except Refused as refused:
        if (episode := played.get(secret)) is not None:
            episode.note_refused(refused)
        error = (codec or chat_completions).error
        await sending.whole(refused.status, error(refused.code, str(refused)))


async def _answer(
    played: Played,
    request: h11.Request,
    data: bytes | None,
    sending: _Sending,
    secret: str,
    route: str,
) -> None:
    """Send the answer to a request. Raises Refused before anything is sent if there is none."""
    if data is None:
        raise Refused(413, "too_large", f"a body must have at most {MAX_BODY_BYTES} bytes")
    method = request.method.decode("ascii")
    if (episode := played.get(secret)) is None:
        raise Refused(404, "not_found", "the episode of this URL is not played (any more)")
    if (method, route) == ("GET", "models"):
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llamarl"}
        return await sending.whole(200, {"object": "list", "data": [model]})
    if method != "POST" or route not in (*PROTOCOLS, COUNT_ROUTE):
        known = f"POST {', '.join((*PROTOCOLS, COUNT_ROUTE))} and GET models"
        raise Refused(404, "not_found", f"a request must be {known}, got {method} {route}")
    headers = {name.decode("ascii"): value for name, value in request.headers}
    is_repeated = headers.get(RETRY_HEADER, b"0") != b"0"
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the body must be a JSON object")
    if route == COUNT_ROUTE:
        found = await episode.count(messages.read(body))
        return await sending.whole(200, {"input_tokens": found})
    codec = PROTOCOLS[route]
    read = codec.read(body)
    asked = episode.ask(replace(read, is_repeated=is_repeated))
    if not read.options.streams:
        reply = await asyncio.shield(asked.reply)
        return await sending.whole(200, codec.respond(reply, body, MODEL))
    texts = asked.texts()
    first = await anext(texts, "")  # an error before the first piece still has its status
    if asked.reply.done():
        asked.reply.result()
    stream = codec.Stream(asked.begun.reply_id, body, MODEL, asked.begun.begins_in_thought)
    await sending.head(200, ("Content-Type", EVENT_TYPE), ("Transfer-Encoding", "chunked"))
    await sending.part(stream.begin() + (stream.text(first) if first else b""))
    async for text in texts:
        await sending.part(stream.text(text))
    await sending.part(stream.end(await asyncio.shield(asked.reply)))
    await sending.end()
