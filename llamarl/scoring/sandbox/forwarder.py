"""The first process in a sandbox without a network: it runs a command, and passes connections to
one port of the loopback interface on to a socket in a file, which leads out.

It is started as `python forwarder.py SOCKET PORT COMMAND...`, exits as the command does, and
imports nothing of this package, which it cannot see."""

import asyncio
import os
import sys
from contextlib import closing

PART_BYTES = 65536


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, until it ends."""
    with closing(writer):
        try:
            while data := await reader.read(PART_BYTES):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass


async def main(path: str, port: int, command: list[str]) -> int:
    """Run the command and return its exit code; 127 if there is no such program."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, out_writer), pump(out_reader, writer))

    await asyncio.start_server(forward, "127.0.0.1", port)
    try:
        process = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return 127
    code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
