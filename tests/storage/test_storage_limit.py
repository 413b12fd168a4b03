"""More rollouts than memory may hold, through units and clients in processes of their own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig
from llamarl.core.faces import Storage, Worker
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.storage.test_storage_processes import Client, memory_files

pytestmark = pytest.mark.full

MIB = 1024 * 1024
LIMIT_BYTES = 8 * MIB
NUM_WRITERS, NUM_ROWS, NUM_TOKENS = 3, 32, 3000


def resident_bytes(pid: int) -> int:
    """The most memory that the process has had."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024


def file_bytes(pid: int) -> int:
    """Of the files in memory that the process has open: what they take, not what they could."""
    sizes = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:llamarl" in os.readlink(path):
                found = path.stat()
                sizes[found.st_ino] = found.st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    return sum(sizes.values())


@pytest.mark.slow
def test_ten_times_the_limit_pass_through_and_memory_stays_near_it(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    write_bytes = NUM_ROWS * NUM_TOKENS * 12

    async def scenario() -> None:
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        spec = StorageSpec(
            unit=0,
            archive_folder=str(tmp_path),
            socket=str(tmp_path / "sockets" / "0"),
            spill_folder=str(tmp_path / "spill"),
            max_bytes=LIMIT_BYTES,
        )
        try:
            group = await cluster.spawn("storage-0", StorageWorker, spec)
            await group.one(Worker).start()
            store = Store([Unit(group.name, group.one(Storage), str(spec.socket))])
            names = [f"writer-{number}" for number in range(NUM_WRITERS)]
            *writers, reader = await asyncio.gather(
                *(cluster.spawn(name, Client, store) for name in [*names, "reader"])
            )
            (pid,) = group.pids
            before, most = resident_bytes(pid), 0
            blocks = [range(i, i + NUM_ROWS) for i in range(0, 10 * 1000, NUM_ROWS)]
            blocks = blocks[: 10 * LIMIT_BYTES // write_bytes + 1]
            waiting = iter(blocks)

            async def write_some(writer) -> None:
                nonlocal most
                for block in waiting:
                    await writer.one(Client).write(list(block), NUM_TOKENS)
                    most = max(most, file_bytes(pid))

            await asyncio.gather(*map(write_some, writers))
            usage = await store.usage()
            assert usage["num_rows"] == len(blocks) * NUM_ROWS
            assert usage["spilled_bytes"] > 8 * LIMIT_BYTES
            assert usage["memory_bytes"] <= LIMIT_BYTES
            assert usage["is_full"] == 0
            for index in np.random.default_rng(0).permutation(len(blocks)):
                row_ids = list(blocks[index])
                assert await reader.one(Client).check(row_ids, NUM_TOKENS)
                await store.retire(row_ids, {"outcome": "trained", "version": 1})
            usage = await store.usage()
            assert (usage["num_rows"], usage["spilled_bytes"]) == (0, 0)
            assert os.listdir(tmp_path / "spill") == []
            grown = resident_bytes(pid) - before
            record_property("memory_bytes", {"files": most, "process": grown})
            # Each writer may have one more write under way.
            assert most <= LIMIT_BYTES + NUM_WRITERS * 1.3 * write_bytes
            assert grown <= LIMIT_BYTES
        finally:
            await cluster.stop()
        assert not (tmp_path / "spill").exists()
        assert not memory_files(pid)

    asyncio.run(scenario())
