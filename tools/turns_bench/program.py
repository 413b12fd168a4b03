"""A program that asks the model over HTTP, and times its requests beyond the tokens of each turn.

Both sides run it as it stands here, llamarl as a part of task.py: it imports nothing of either.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from urllib.parse import urlsplit

LENGTHS = 10, 30  # tokens of a turn


async def ask(url: str, key: str, number: int, num_turns: int, token_s: float) -> list[float]:
    """Seconds of each request of one conversation: each turn follows the ones before."""
    parts, times = urlsplit(url), []
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    messages = [{"role": "user", "content": "1*2"}]
    lengths = random.Random(number)
    for _ in range(num_turns):
        num_tokens = lengths.randint(*LENGTHS)
        asked = {"model": "any", "messages": messages, "max_tokens": num_tokens}
        body = json.dumps(asked).encode()
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        start_s = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        times.append(time.perf_counter() - start_s - token_s * num_tokens)
        assert b" 200 " in answered, answered
        length = int(answered.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found = json.loads(await reader.readexactly(length))
        messages.append(found["choices"][0]["message"])
        messages.append({"role": "user", "content": "3"})
    writer.close()
    return times
