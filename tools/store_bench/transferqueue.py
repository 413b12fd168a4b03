"""TransferQueue on the benchmark's job: a program that runs in the environment of `make rivals`.

    python -m store_bench.transferqueue NUM_UNITS NUM_CONSUMERS

Reads one request a line from standard input, a JSON object with the arguments of `Cluster.run`, and
answers each with its seconds. Controller and SimpleStorage units run under Ray, as
`transfer_queue.init` starts them; producer and consumers are processes with a client each, made as
its StreamingDataset makes one. Of its settings the fastest on one machine are used: polling, or a
consumer that finds too few rows stops the controller for 5 s; one thread for torch and for each
client's sockets, for there are more processes than cores; a garbage collector that runs seldom; and
memory that a message took is kept for the next, which gives a fifth more rows per second.

A field of the TensorDict that is put is a NonTensorStack of raw bytes, of which a whole message is
one frame: several times as fast as tensors, padded or nested, which move one by one. Before the
clock starts, the TensorDicts are made and the controller has opened the rows. A consumer has its
rows when it has one array of values per column.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
from tensordict import NonTensorStack, TensorDict
from weights_bench.processes import Remote, call_all

from store_bench import rows
from store_bench.rows import Flat, Taken, Work

EMPTY_PAUSE_S = 0.002  # after a take that found too few rows
SETTINGS = {
    "TQ_NUM_THREADS": "1",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


class _Client:
    """A client of its own in a process of its own."""

    def __init__(self, name: str, config: Any) -> None:
        from transfer_queue.client import AsyncTransferQueueClient

        logging.disable(logging.WARNING)
        self.client = AsyncTransferQueueClient(name, config.controller.zmq_info)
        backend = config.backend.storage_backend
        self.client.initialize_storage_manager(backend, config.backend[backend])


class Producer(_Client):
    """Puts rows."""

    def __init__(self, config: Any) -> None:
        super().__init__("producer", config)

    def prepare(self, work: Work) -> int:
        """Make the TensorDicts of all puts; the rows' digest."""
        columns = rows.make_rows(work)
        starts = range(0, work.rows, work.batch_rows)
        parts = [slice(start, start + work.batch_rows) for start in starts]
        self._batches = [
            TensorDict(
                {name: _field(columns[name][part]) for name in rows.NAMES},
                batch_size=len(columns["reward"][part]),
            )
            for part in parts
        ]
        rows.calm_gc()
        return rows.digest(rows.join(columns))

    async def open(self, partition: str) -> None:
        """Have the controller make the rows of all puts."""
        self._metas = [
            await self.client.async_get_meta(rows.NAMES, len(batch), partition, mode="insert")
            for batch in self._batches
        ]

    async def put(self, work: Work) -> float:
        """When the puts began."""
        batches = zip(self._batches, self._metas, strict=True)

        async def put_some() -> None:
            for batch, meta in batches:
                await self.client.async_put(batch, meta)

        start_s, _ = await rows.at_once(put_some, work)
        return start_s

    async def clear(self, partition: str) -> None:
        """Free all rows."""
        await self.client.async_clear_partition(partition)


class Consumer(_Client):
    """Takes rows until none are `left`."""

    def __init__(self, name: str, config: Any, left: Any) -> None:
        super().__init__(name, config)
        self._left = left
        rows.calm_gc()

    async def take(self, partition: str, work: Work, is_checked: bool) -> Taken:
        """Take and get batches until every row was taken."""
        found: list[Flat] = []

        async def take_some() -> None:
            while self._left.value > 0:
                meta = await self.client.async_get_meta(
                    rows.NAMES, work.batch_rows, partition, task_name="train"
                )
                if not meta.size:
                    await asyncio.sleep(EMPTY_PAUSE_S)
                    continue
                flat = _values(await self.client.async_get_data(meta))
                with self._left.get_lock():
                    self._left.value -= meta.size
                if is_checked:
                    found.append(flat)

        _, end_s = await rows.at_once(take_some, work)
        return rows.taken_of(end_s, found)


def _field(cells: list[np.ndarray]) -> Any:
    return NonTensorStack.from_list([cell.tobytes() for cell in cells])


def _values(batch: TensorDict) -> Flat:
    return {
        name: np.frombuffer(b"".join(batch[name].tolist()), dtype)
        for name, dtype in rows.DTYPES.items()
    }


class Cluster:
    """Ray, TransferQueue's controller and units, one producer, and consumers."""

    def __init__(self, num_units: int, num_consumers: int, folder: str) -> None:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        ray.init(
            address="local",
            num_cpus=num_units + 2,  # what its actors ask for, not what there is
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        units = {"num_data_storage_units": num_units}
        config = transfer_queue.init(
            OmegaConf.create(
                {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": units}}
            )
        )
        self._left = multiprocessing.get_context("spawn").Value("q", 0)
        self._producer = Remote(Producer, config)
        self._consumers = [
            Remote(Consumer, f"consumer{number}", config, self._left)
            for number in range(num_consumers)
        ]
        self._prepared: Work | None = None
        self._digest = 0
        self._num_runs = 0

    async def run(self, work: Work, is_checked: bool) -> float:
        """Move all rows once, consumers take while the producer puts; seconds."""
        if work != self._prepared:
            self._digest = await self._producer.call("prepare", work)
            self._prepared = work
        self._num_runs += 1
        partition = f"run{self._num_runs}"
        self._left.value = work.rows
        await self._producer.call("open", partition)
        putting = asyncio.create_task(self._producer.call("put", work))
        consumers = self._consumers[: work.consumers]
        taken = await call_all(consumers, "take", partition, work, is_checked)
        start_s = await putting
        if is_checked:
            rows.check(work, self._digest, taken)
        await self._producer.call("clear", partition)
        return rows.flow_s(start_s, taken)

    def close(self) -> None:
        """End all processes."""
        import ray
        import transfer_queue

        for remote in [self._producer, *self._consumers]:
            remote.close()
        transfer_queue.close()
        ray.shutdown()


async def serve(num_units: int, num_consumers: int, folder: str) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    cluster = Cluster(num_units, num_consumers, folder)
    print(0.0, file=answers, flush=True)  # ready
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            work = Work(**request.pop("work"))
            print(json.dumps(await cluster.run(work, **request)), file=answers, flush=True)
    finally:
        cluster.close()


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    ray_folder = tempfile.mkdtemp(prefix="tq-")
    try:
        asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), ray_folder))
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
