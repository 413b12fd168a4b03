"""The server on this machine's loopback interface through which programs ask for turns of the
model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Protocol

import h11

from llamarl.scoring.agent.chat_completions import read_chat, respond_chat
from llamarl.scoring.agent.turns import AgentRequest, Refused, Reply, encode

HOST = "127.0.0.1"
MODEL = "policy"
MAX_BODY_BYTES = 64 * 2**20
READ_BYTES = 65536
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's own client: above 0 in a repeated request
JSON_TYPE = "application/json"
PROTOCOLS = {"chat/completions": (read_chat, respond_chat)}
"""The APIs by route, each as two functions: (body of a request) -> AgentRequest, which may raise
Refused, and (the model's reply, body of the request, name of the model) -> content type and body of
the response."""


class Answering(Protocol):
    """An episode that can be asked for turns."""

    async def answer(self, request: AgentRequest) -> Reply:
        """Return the model's reply. Raises Refused if the request cannot be served."""


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
    with closing(writer), suppress(ConnectionError, h11.RemoteProtocolError):
        while (found := await _receive(connection, reader)) is not None:
            status, kind, data = await _respond(played, *found)
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


async def _respond(
    played: Played, request: h11.Request, data: bytes | None
) -> tuple[int, str, bytes]:
    """Return the status, content type and body that answer a request."""
    try:
        if data is None:
            raise Refused(413, "too_large", f"a body must have at most {MAX_BODY_BYTES} bytes")
        secret, _, route = request.target.decode("ascii").strip("/").partition("/v1/")
        method = request.method.decode("ascii")
        if (episode := played.get(secret)) is None:
            raise Refused(404, "not_found", "the episode of this URL is not played (any more)")
        if (method, route) == ("GET", "models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llamarl"}
            return 200, JSON_TYPE, encode({"object": "list", "data": [model]})
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
        messages, schemas = read(body)
        reply = await episode.answer(AgentRequest(messages, schemas, is_repeated))
        return 200, *respond(reply, body, MODEL)
    except Refused as error:
        said = {"message": str(error), "type": "invalid_request_error", "code": error.code}
        return error.status, JSON_TYPE, encode({"error": {**said, "param": None}})
