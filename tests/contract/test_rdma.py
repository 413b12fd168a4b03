"""A publish over Monarch's RDMA buffers, between executor processes."""

import asyncio
import os
import subprocess
import time

import pytest
import torch

from llamarl.cluster import make_cluster
from llamarl.config import ClusterConfig
from llamarl.weights.arena import Arena
from llamarl.weights.comparison import compare
from llamarl.weights.errors import TargetLost
from llamarl.weights.layout import Box, ParameterLayout, Route
from llamarl.weights.plan import plan
from llamarl.weights.writer import Writer

pytestmark = pytest.mark.slow

SHAPE = (300, 40)


def parameters(buffer, strides):
    box = Box(start=(0, 0), stop=SHAPE, buffer=buffer, offset=0, strides=strides)
    return {"w": ParameterLayout(shape=SHAPE, dtype="float32", boxes=(box,))}


class Source:
    """An executor with weights."""

    def __init__(self, rank, num_ranks, spans):
        from llamarl.cluster.rdma import MonarchRdma

        self._weights = torch.zeros(SHAPE)
        self._writer = Writer(
            rank, "a", {"w": self._weights}, parameters("w", (40, 1)),
            timeout_s=10, rdma=MonarchRdma(),
        )  # fmt: skip

    async def layout(self):
        return self._writer.layout()

    async def connect(self, route):
        self._writer.connect(0, route)

    async def write(self, version, offers):
        self._writer.begin_step()
        self._weights.normal_(generator=torch.Generator().manual_seed(version))
        self._writer.present(version)
        return await asyncio.to_thread(self._writer.write, version, offers)


class Target:
    """An executor with an arena, transposed."""

    def __init__(self, rank, num_ranks, spans):
        from llamarl.cluster.rdma import MonarchRdma

        self._arena = Arena(
            parameters=parameters("arena", (1, 300)), num_elements=12000, dtype=torch.float32,
            replica=0, rank=rank, run_id="test", host="b", rdma=MonarchRdma(),
        )  # fmt: skip

    async def layout(self):
        return self._arena.layout()

    async def connect(self, route):
        self._arena.connect(route)

    async def offer(self, version):
        return await asyncio.to_thread(self._arena.offer, version, 0)

    async def fingerprint(self, version):
        return await asyncio.to_thread(self._arena.fingerprint, version, 0)

    async def flip(self, version):
        flat = self._arena.flip(version, 0)
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
            target = await cluster.spawn("target", Target, {})
            source = await cluster.spawn("source", Source, {})
            copies = plan([await source.first.layout()], [await target.first.layout()])
            route = Route(
                source="trainer", replica=0, transport="rdma", copies=tuple(copies),
                bucket_bytes=5000,
            )  # fmt: skip
            await asyncio.gather(source.first.connect(route), target.first.connect(route))
            for version in range(3):
                offers = [await target.first.offer(version)]
                written = await source.first.write(version, offers)
                compare(written, await target.first.fingerprint(version), 0, version)
                assert await target.first.flip(version)
            assert listeners([os.getpid(), *target.pids, *source.pids]) <= of_other_tests
            offers = [await target.first.offer(3)]
            await target.stop()
            started_s = time.monotonic()
            with pytest.raises(TargetLost, match="generator 0 rank 0 is out of reach"):
                await source.first.write(3, offers)
            assert time.monotonic() - started_s < 30
        finally:
            await cluster.stop()

    asyncio.run(run())
