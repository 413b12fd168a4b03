"""TRL's way of a request: OpenEnv's capture proxy (`capture.py`) between programs and an engine.

In place of vLLM stands a server that waits as long as the tokens of a turn take, and answers as
vLLM does where token ids are asked for. It renders no chat template and tokenizes nothing, so what
vLLM's own server costs is left out.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from rivals import PYTHON, environment

from turns_bench.program import ask

TURN, OBSERVATION = [2, 3, 4, 5], [6, 7, 8]  # ids of a turn, and of what is said after it
LOGPROB = -0.5


async def measure(num_episodes: int, num_turns: int, token_s: float) -> tuple[list[float], float]:
    """Seconds of each request, and of all together."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(reader, writer, token_s)

    engine = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    child = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-m", "turns_bench.capture", f"http://127.0.0.1:{port}"),
        str(num_episodes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    begun = json.loads(await child.stdout.readline())
    url = f"http://127.0.0.1:{begun['port']}/v1"
    start_s = time.perf_counter()
    programs = (
        ask(url, key, number, num_turns, token_s) for number, key in enumerate(begun["keys"])
    )
    times = [each for found in await asyncio.gather(*programs) for each in found]
    elapsed_s = time.perf_counter() - start_s
    child.stdin.close()
    captured = json.loads(await child.stdout.readline())
    assert captured == [num_turns] * num_episodes, "each turn was captured once"
    await child.wait()
    engine.close()
    return times, elapsed_s


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token_s: float
) -> None:
    """Answer all requests of one connection."""
    while head := await _read_head(reader):
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        await asyncio.sleep(token_s * asked["max_tokens"])
        body = json.dumps(_answer(asked)).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        writer.write(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    writer.close()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers to a request with `return_token_ids` and log-probs."""
    assert asked["return_token_ids"]
    num_before = sum(message["role"] == "assistant" for message in asked["messages"])
    prompt_ids = [1, *(TURN + OBSERVATION) * num_before]
    entries = [{"token": f"{i}", "logprob": LOGPROB, "top_logprobs": []} for i in TURN]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Answer: 2"},
        "finish_reason": "stop",
        "token_ids": TURN,
        "logprobs": {"content": entries},
    }
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(TURN)}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": asked["model"],
        "prompt_token_ids": prompt_ids,
        "choices": [choice],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }
