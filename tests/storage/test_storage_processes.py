"""Storage units and their clients in processes of their own, some of which are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarl.cluster import make_cluster
from llamarl.core import memory
from llamarl.core.config import ClusterConfig
from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import Storage, Worker
from llamarl.storage.client import Store, Unit
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.storage.stored_rows import NAMES, assert_same, rows

pytestmark = pytest.mark.full


class Client(Worker):
    """Writes and reads rows, as generators and trainers do."""

    def __init__(self, storage, *, rank, num_ranks, spans) -> None:
        self.storage = storage

    async def write(self, row_ids: list[int], num_tokens: int) -> int:
        await self.storage.write(row_ids, rows(row_ids, num_tokens))
        return os.getpid()

    async def check(self, row_ids: list[int], num_tokens: int) -> bool:
        """The rows are whole; False if none is there, or the socket did not lead to them."""
        try:
            found = await self.storage.read(row_ids, NAMES)
        except KeyError:
            return False
        assert_same(found, rows(row_ids, num_tokens))
        return not any(unit._is_elsewhere for unit in self.storage._units)

    async def die_in_write(self, row_ids: list[int], num_tokens: int, num_pieces: int) -> None:
        """Be killed when so many pieces of the write were handed to the kernel."""
        memory.MAX_BUFFERS = 4
        left, pwritev = num_pieces, os.pwritev

        def count(*arguments):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return pwritev(*arguments)

        os.pwritev = count
        await self.storage.write(row_ids, rows(row_ids, num_tokens))


@asynccontextmanager
async def processes(
    folder: Path, num_units: int = 1, num_writers: int = 1, liveness_timeout_s: float = 60.0
) -> AsyncIterator[tuple]:
    """(units, writer and so on, reader, store)."""
    config = ClusterConfig(liveness_timeout_s=liveness_timeout_s)
    cluster = make_cluster(config, spans_folder=None, logs_folder=str(folder / "logs"))
    specs = [
        StorageSpec(
            unit=number,
            archive_folder=None,
            socket=str(folder / "sockets" / str(number)),
        )
        for number in range(num_units)
    ]
    try:
        units = await asyncio.gather(
            *(cluster.spawn(f"storage-{s.unit}", StorageWorker, s) for s in specs)
        )
        await asyncio.gather(*(unit.one(Worker).start() for unit in units))
        store = Store(
            [
                Unit(unit.name, unit.one(Storage), spec.socket)
                for unit, spec in zip(units, specs, strict=True)
            ]
        )
        names = [*(f"writer-{number}" for number in range(num_writers)), "reader"]
        clients = await asyncio.gather(*(cluster.spawn(name, Client, store) for name in names))
        yield units, *clients, store
    finally:
        await cluster.stop()


def test_a_client_that_is_killed_in_a_write_leaves_nothing_visible(tmp_path: Path) -> None:
    num_rows, num_tokens = 50, 2000  # 250 cells and 2 vectors: 63 pieces of 4

    async def scenario() -> None:
        num_pieces = (0, 1, 20, 62)  # it sends the write after the last one
        async with processes(tmp_path, num_writers=len(num_pieces)) as (_, *writers, reader, store):
            row_ids = list(range(num_rows))
            for written, (writer, pieces) in enumerate(zip(writers, num_pieces, strict=True), 1):
                await writer.one(Client).write([100 + pieces], num_tokens)
                with pytest.raises(ExecutorLost, match=f"lost executor {writer.name}"):
                    await writer.one(Client).die_in_write(row_ids, num_tokens, pieces)
                assert not await reader.one(Client).check(row_ids, num_tokens)
                assert (await store.usage())["num_rows"] == written
                assert await reader.one(Client).check([100 + pieces], num_tokens)

    asyncio.run(scenario())


def states(pid: int) -> set[str]:
    """Of all threads of a process."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_a_unit_killed_in_a_write_is_named_to_every_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, 2) as (units, writer, reader, store):
            await writer.one(Client).write([0, 1, 2, 3], 5000)
            assert await reader.one(Client).check([3, 2, 1, 0], 5000)
            (pid,) = units[1].pids
            os.kill(pid, signal.SIGSTOP)
            while states(pid) != {"T"}:
                await asyncio.sleep(0.01)
            writing = asyncio.create_task(writer.one(Client).write([4, 5], 5000))
            await asyncio.sleep(0.5)
            assert not writing.done()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ExecutorLost, match="lost executor storage-1"):
                await asyncio.wait_for(writing, 20)
            with pytest.raises(ExecutorLost, match="lost executor storage-1"):
                await asyncio.wait_for(reader.one(Client).check([1], 5000), 20)
            with pytest.raises(ExecutorLost, match="lost executor storage-1"):
                await asyncio.wait_for(store.retire([1], {"outcome": "trained"}), 20)
            assert await reader.one(Client).check([2, 0], 5000)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_unit_that_stands_still_ends_what_waits_for_its_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, liveness_timeout_s=4) as (units, writer, _, store):
            await writer.one(Client).write([0], 10)
            assert (await store.usage())["num_rows"] == 1
            (pid,) = units[0].pids
            os.kill(pid, signal.SIGSTOP)
            while states(pid) != {"T"}:
                await asyncio.sleep(0.01)
            with pytest.raises(ExecutorLost, match=r"lost executor storage-0.*silent for 4 s"):
                await asyncio.wait_for(store.retire([0], {"outcome": "trained"}), 60)

    asyncio.run(scenario())


def memory_files(pid: int | str) -> set[int]:
    """Inodes of the files in memory that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:llamarl" in os.readlink(path):
                    found.add(path.stat().st_ino)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:llamarl" in line:
                found.add(int(line.split()[4]))
    return found


def test_nothing_is_left_of_killed_units(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path) as (units, writer, reader, store):
            row_ids = list(range(100))
            for first in range(0, 100, 20):
                await writer.one(Client).write(row_ids[first : first + 20], 20_000)
            assert await reader.one(Client).check(row_ids, 20_000)
            assert (await store.usage())["memory_bytes"] > 100 * 20_000 * 12
            (pid,) = units[0].pids
            files = memory_files(pid)  # without a name, so only processes keep them
            assert len(files) == 5
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ExecutorLost):
                await units[0].watch()
        held = [memory_files(path.name) for path in Path("/proc").glob("[0-9]*")]
        assert not files & set().union(*held)

    asyncio.run(scenario())
