"""TransferQueue on the benchmark's job: a program that runs in the environment of `make rivals`.

    python -m store_bench.transferqueue NUM_UNITS NUM_CONSUMERS

Reads one request a line from standard input, a JSON object with the arguments of `Cluster.run`, and
answers each with a line of times. Controller and SimpleStorage units run under Ray, as
`transfer_queue.init` starts them; producer and consumers are processes with a client each, made as
its StreamingDataset makes one. Of its settings the fastest on one machine are used: polling, or a
consumer that finds too few rows stops the controller for 5 s; one thread for torch and for each
client's sockets, for there are more processes than cores; a garbage collector that runs seldom; and
memory that a message took is kept for the next, which gives a fifth more rows per second.

Forms of a cell, as fields of the TensorDict that is put: "jagged" and "padded" are its tensors,
which it moves without copying, but one by one, each in a frame of its own; "bytes" lies in a
NonTensorStack of raw bytes, of which a whole message is one frame. Before the clock starts, the
TensorDicts are made and the controller has opened the rows. A consumer has its rows when it has one
array of values per column; padding may stay in it.
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
import time
from typing import Any

import numpy as np
import psutil
import torch
from tensordict import NonTensorStack, TensorDict
from weights_bench.processes import Remote, call_all

from store_bench import rows
from store_bench.rows import Flat, Taken, Work

FIXED = ("prompt_ids", "reward")  # columns whose cells have one length
UNIT_PROCESS = "ray::SimpleStorageUnit"
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
        self._notify_s = 0.0
        manager = self.client.storage_manager
        notify = manager.notify_data_update

        async def timed(*args: Any, **kwargs: Any) -> None:
            start_s = time.perf_counter()
            await notify(*args, **kwargs)
            self._notify_s += time.perf_counter() - start_s

        manager.notify_data_update = timed

    def prepare(self, work: Work) -> int:
        """Make the TensorDicts of all puts; the rows' digest."""
        columns = rows.make_rows(work)
        starts = range(0, work.rows, work.batch_rows)
        parts = [slice(start, start + work.batch_rows) for start in starts]
        self._batches = [
            TensorDict(
                {name: _field(name, columns[name][part], work.form) for name in rows.NAMES},
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

    async def put(self, work: Work) -> tuple[tuple[float, float], float]:
        """When the puts began and ended, and how long the controller was waited for in them."""
        self._notify_s = 0.0
        batches = zip(self._batches, self._metas, strict=True)

        async def put_some() -> None:
            for batch, meta in batches:
                await self.client.async_put(batch, meta)

        return await rows.at_once(put_some, work), self._notify_s

    async def clear(self, partition: str) -> float:
        """Free all rows; seconds."""
        start_s = time.monotonic()
        await self.client.async_clear_partition(partition)
        return time.monotonic() - start_s


class Consumer(_Client):
    """Takes rows until none are `left`."""

    def __init__(self, name: str, config: Any, left: Any) -> None:
        super().__init__(name, config)
        self._left = left
        rows.calm_gc()

    async def take(self, partition: str, work: Work, is_checked: bool) -> Taken:
        """Take and get batches until every row was taken."""
        take_s = get_s = 0.0
        found: list[Flat] = []

        async def take_some() -> None:
            nonlocal take_s, get_s
            while self._left.value > 0:
                start_s = time.perf_counter()
                meta = await self.client.async_get_meta(
                    rows.NAMES, work.batch_rows, partition, task_name="train"
                )
                took_s = time.perf_counter()
                take_s += took_s - start_s
                if not meta.size:
                    await asyncio.sleep(EMPTY_PAUSE_S)
                    continue
                flat = _values(await self.client.async_get_data(meta))
                get_s += time.perf_counter() - took_s
                with self._left.get_lock():
                    self._left.value -= meta.size
                if is_checked:
                    found.append(flat)

        span_s = await rows.at_once(take_some, work)
        return rows.taken_of(span_s, take_s, get_s, found)


def _field(name: str, cells: list[np.ndarray], form: str) -> Any:
    if form == "bytes":
        return NonTensorStack.from_list([cell.tobytes() for cell in cells])
    tensors = [torch.from_numpy(cell) for cell in cells]
    if name in FIXED:
        return torch.stack(tensors)
    if form == "padded":
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def _values(batch: TensorDict) -> Flat:
    flat: Flat = {}
    for name, dtype in rows.DTYPES.items():
        field = batch[name]
        if isinstance(field, torch.Tensor):
            flat[name] = (field.values() if field.is_nested else field.flatten()).numpy()
        else:
            flat[name] = np.frombuffer(b"".join(field.tolist()), dtype)
    return flat


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
        self._pids = [
            process.pid
            for process in psutil.Process().children(recursive=True)
            if process.cmdline()[:1] == [UNIT_PROCESS]
        ]
        self._prepared: Work | None = None
        self._digest = 0
        self._num_runs = 0

    async def run(self, work: Work, is_streamed: bool, is_checked: bool) -> dict[str, float]:
        """Move all rows once; is_streamed: consumers take while the producer puts."""
        if work != self._prepared:
            self._digest = await self._producer.call("prepare", work)
            self._prepared = work
        self._num_runs += 1
        partition = f"run{self._num_runs}"
        self._left.value = work.rows
        await self._producer.call("open", partition)
        before_s = rows.cpu_s(self._pids)
        putting = asyncio.create_task(self._producer.call("put", work))
        if not is_streamed:
            await putting
        consumers = self._consumers[: work.consumers]
        taken = await call_all(consumers, "take", partition, work, is_checked)
        put, notify_s = await putting
        units_s = rows.cpu_s(self._pids) - before_s
        if is_checked:
            rows.check(work, self._digest, taken)
        clear_s = await self._producer.call("clear", partition)
        return rows.times(put, notify_s, taken, units_s, clear_s)

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
    print(json.dumps({"ready": True}), file=answers, flush=True)
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
