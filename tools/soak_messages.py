"""What Monarch alone keeps of each message, in the process that calls and in the one that answers.

    python tools/soak_messages.py [--messages 16000] [--json FILE]

An actor in a process of its own returns a number. In one way Monarch answers, as it does any call;
in the other one the caller sends a port along, which stays open, and the actor answers there.
Nothing of llamarl runs. `growth_bytes_per_message` is the slope of private memory (RssAnon) over
the second half of the messages; the first half warms up.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from harness import Bench
from monarch.actor import Actor, Channel, concurrent_endpoint, this_host
from weights_bench.memory import private_bytes

WAYS = ("Monarch answers", "a port as argument")
NUM_SAMPLES = 16


class Echo(Actor):
    """Answers in either way."""

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def echo(self, number: int) -> int:
        return number

    @concurrent_endpoint
    async def send(self, number: int, port: Any) -> None:
        port.send(number)


async def grow(way: str, num_messages: int) -> tuple[float, float]:
    """Bytes per message that the caller and the actor's process keep."""
    actor = this_host().spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
    pids = os.getpid(), await actor.pid.call_one()
    port, receiver = Channel[int].open()

    async def by_call(number: int) -> None:
        await actor.echo.call_one(number)

    async def by_port(number: int) -> None:
        actor.send.broadcast(number, port)
        await receiver.recv()

    ask: Callable[[int], Awaitable[None]] = by_call if way == WAYS[0] else by_port
    held = []
    for number in range(num_messages):
        await ask(number)
        if (number + 1) % (num_messages // NUM_SAMPLES) == 0:
            held.append((number, *map(private_bytes, pids)))
    late = np.array(held[len(held) // 2 :])
    caller, actors = (float(np.polyfit(late[:, 0], late[:, each], 1)[0]) for each in (1, 2))
    return caller, actors


def main() -> None:
    """Measure each way in a process of its own."""
    bench = Bench(__doc__)
    bench.option("--messages", type=int, default=16_000)
    bench.option("--way", choices=WAYS, help="this one, in this process")
    arguments = bench.parse()
    if arguments.messages < NUM_SAMPLES:
        sys.exit(f"soak_messages: --messages must be at least {NUM_SAMPLES}")
    if arguments.way:
        print(*asyncio.run(grow(arguments.way, arguments.messages)), flush=True)
        os._exit(0)  # Monarch's own end may wait for its threads
    for way in WAYS:
        words = [sys.executable, __file__, f"--messages={arguments.messages}", f"--way={way}"]
        said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        sides = zip(("caller", "actor"), map(float, said.split()[-2:]), strict=True)
        for side, growth in sides:
            bench.add("growth_bytes_per_message", growth, f"{way}, {side}")
    bench.write()


if __name__ == "__main__":
    main()
