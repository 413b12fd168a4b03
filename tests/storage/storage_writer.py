"""A process that writes rows into a storage unit, as lines on its standard input order.

    python -m tests.storage.storage_writer SOCKET PACKET_BYTES

A line is JSON: [order, writer, row ids, entries per row, stamp]. Each order is one write, several
may be under way; its number is written when it is done, with what went wrong if something did.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from llamarl.cluster import sockets
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
)
from llamarl.storage.client import Unit


def stamped(row_ids: list[int], num_entries: int, stamp: int) -> Columns:
    """Rollouts of which every entry is the stamp."""
    sampling = np.full(6, stamp, np.float64)
    sampling[-1] = FINISH_CODES[FinishReason.STOP]
    dtypes = {RESPONSE_IDS: np.int32, GENERATOR_LOGPROBS: np.float32, TOKEN_VERSIONS: np.int32}
    columns: Columns = {
        name: [np.full(num_entries, stamp, dtype) for _ in row_ids]
        for name, dtype in dtypes.items()
    }
    prompts = [np.array([row_id, stamp], np.int32) for row_id in row_ids]
    return columns | {PROMPT_IDS: prompts, SAMPLING: [sampling] * len(row_ids)}


class Busy:
    """What a unit that is slow answers to calls, by which a client asks whether it is there."""

    async def usage(self) -> dict[str, int]:
        return await asyncio.Event().wait()  # type: ignore[return-value]


async def write(unit: Unit, line: str) -> None:
    order, writer, row_ids, num_entries, stamp = json.loads(line)
    error = ""
    try:
        await unit.write(row_ids, stamped(row_ids, num_entries, stamp), writer)
    except Exception as raised:
        error = repr(raised)
    sys.stdout.write(json.dumps([order, error]) + "\n")
    sys.stdout.flush()


async def main(socket: str, packet_bytes: str) -> None:
    sockets.MAX_PACKET_BYTES = int(packet_bytes)
    unit = Unit("storage-0", Busy(), socket)  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(write(unit, line.decode()))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
