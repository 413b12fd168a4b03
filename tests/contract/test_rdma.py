"""A publish over Monarch's RDMA buffers, between executor processes."""

import asyncio
import os
import subprocess
import time

import pytest
import torch

from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig, WeightsConfig
from llamarl.core.errors import TargetLost
from llamarl.publish.buckets import Memory
from llamarl.publish.comparison import compare
from llamarl.publish.layout import Box, ParameterLayout
from llamarl.publish.reshard import pack, plan, split
from llamarl.publish.source import Writer
from llamarl.publish.target import WeightBuffer

pytestmark = pytest.mark.slow

SHAPE = (300, 40)


def parameters(buffer, strides):
    box = Box(start=(0, 0), stop=SHAPE, buffer=buffer, offset=0, strides=strides)
    return {"w": ParameterLayout(shape=SHAPE, dtype="float32", boxes=(box,))}


class Source:
    """An executor with weights."""

    def __init__(self, spec, rank, num_ranks, spans):
        from llamarl.cluster.rdma_buffers import MonarchRdma

        self._weights = torch.zeros(SHAPE)
        self._writer = Writer(
            rank, "a", {"w": self._weights}, parameters("w", (40, 1)),
            timeout_s=10, rdma=MonarchRdma(), packed_bytes=1 << 20,
        )  # fmt: skip

    async def layout(self):
        return self._writer.layout()

    async def connect(self, route):
        self._writer.connect(route.replica, route)

    async def train(self, version):
        self._writer.tensors.begin_step()
        self._weights.normal_(generator=torch.Generator().manual_seed(version))
        self._writer.tensors.label(version)

    async def write(self, version, handles):
        return await asyncio.to_thread(self._writer.write, version, handles)


class Target:
    """An executor with a weight buffer, transposed."""

    def __init__(self, replica, rank, num_ranks, spans):
        from llamarl.cluster.rdma_buffers import MonarchRdma

        boxes = parameters("weights", (1, 300))
        self._weight_buffer = WeightBuffer(
            Memory(parameters=boxes, num_elements=12000, dtype=torch.float32), WeightsConfig(),
            replica=replica, rank=rank, run_id="test", host="b", rdma=MonarchRdma(),
        )  # fmt: skip

    async def layout(self):
        return self._weight_buffer.layout()

    async def connect(self, route):
        self._weight_buffer.connect(route)

    async def prepare(self, version):
        return await asyncio.to_thread(self._weight_buffer.prepare, version, 0)

    async def verify(self, version):
        return await asyncio.to_thread(self._weight_buffer.verify, version, 0)

    async def commit(self, version):
        flat = self._weight_buffer.commit(version, 0)
        expected = torch.empty(SHAPE).normal_(generator=torch.Generator().manual_seed(version))
        return torch.equal(flat.view(40, 300).t(), expected)


def listeners(pids):
    """TCP addresses on which one of these processes listens."""
    lines = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    mine = (line for line in lines.splitlines() if any(f"pid={pid}," in line for pid in pids))
    return {line.split()[3] for line in mine}


def test_versions_arrive_nothing_listens_and_a_dead_replica_is_lost(tmp_path) -> None:
    async def run():
        of_other_tests = listeners([os.getpid()])
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        try:
            target = await cluster.spawn("target", Target, 0)
            source = await cluster.spawn("source", Source, {})
            copies = plan([await source.call_one.layout()], [await target.call_one.layout()])
            sending, receiving = split(
                pack(copies), (), source="trainer", replica=0, transport="rdma", bucket_bytes=5000
            )
            await asyncio.gather(
                source.call_one.connect(sending), target.call_one.connect(receiving)
            )
            for version in range(3):
                await source.call_one.train(version)
                handles = [await target.call_one.prepare(version)]
                written = await source.call_one.write(version, handles)
                compare(written, await target.call_one.verify(version), 0, version)
                assert await target.call_one.commit(version)
            assert listeners([os.getpid(), *target.pids, *source.pids]) <= of_other_tests
            await source.call_one.train(3)
            handles = [await target.call_one.prepare(3)]
            await target.stop()
            started_s = time.monotonic()
            with pytest.raises(TargetLost, match="generator 0 rank 0 is out of reach"):
                await source.call_one.write(3, handles)
            assert time.monotonic() - started_s < 30
        finally:
            await cluster.stop()

    asyncio.run(run())


def test_two_replicas_are_written_from_the_same_memory_at_once(tmp_path) -> None:
    async def run():
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        try:
            targets = [await cluster.spawn(f"target-{i}", Target, i) for i in range(2)]
            source = await cluster.spawn("source", Source, {})
            for replica, target in enumerate(targets):
                copies = plan([await source.call_one.layout()], [await target.call_one.layout()])
                sending, receiving = split(
                    pack(copies), (), source="trainer", replica=replica, transport="rdma",
                    bucket_bytes=5000,
                )  # fmt: skip
                await target.call_one.connect(receiving)
                await source.call_one.connect(sending)

            async def publish(replica, version):
                target = targets[replica].call_one
                written = await source.call_one.write(version, [await target.prepare(version)])
                compare(written, await target.verify(version), replica, version)
                assert await target.commit(version)

            for version in range(5):
                await source.call_one.train(version)
                await asyncio.gather(publish(0, version), publish(1, version))
        finally:
            await cluster.stop()

    asyncio.run(run())
