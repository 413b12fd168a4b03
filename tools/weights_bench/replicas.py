"""What a publish to several replicas, each on a host of its own, costs a trainer rank.

Two trainer ranks send over gloo to replicas of two ranks, as in the other sections; here a process
has both ranks of a replica. `trainer_cpu_s` is the CPU time that a trainer rank takes for one
publish, threads of gloo included, the mean of both. `packing_cpu_s` is that of the same messages on
a transport that sends nothing: casting, summing and packing alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import Rounds, Values, turns

from llamarl.config import WeightsConfig
from llamarl.metrics.span import Spans
from llamarl.weights.layout.boxes import RankLayout, Route, StagingHandle
from llamarl.weights.layout.buckets import Memory
from llamarl.weights.layout.kinds import WeightKind
from llamarl.weights.layout.reshard import plan
from llamarl.weights.layout.split_route import SplitRoute, pack, split
from llamarl.weights.sync.publisher import Publisher
from llamarl.weights.sync.weight_buffer import WeightBuffer
from llamarl.weights.sync.writer import Writer
from weights_bench.model import DTYPES, NUM_RANKS, Model, generator_layouts, trainer_layouts, values
from weights_bench.processes import Remote, call_all
from weights_bench.publishing import Trainer

WAYS = {"packed for each": 0, "packed once": WeightsConfig().packed_bytes}
LIMIT_S = 600.0


class Nowhere:
    """Stands for RDMA buffers; takes no time."""

    def write(self, handle: object, message: object, timeout_s: float) -> None:
        """Nothing is sent."""


class SendingRank:
    """A trainer rank whose writes to several replicas run side by side."""

    def __init__(self, model: Model, rank: int) -> None:
        self._rank = rank
        self._layouts = trainer_layouts(model, rank)
        self._shards = {
            name: values(name, layout.boxes[0], DTYPES[model.dtype])
            for name, layout in self._layouts.items()
        }
        self._writer = self._made(0)

    def _made(self, packed_bytes: int) -> Writer:
        return Writer(
            self._rank,
            "trainer",
            self._shards,
            self._layouts,
            timeout_s=LIMIT_S,
            rdma=Nowhere(),  # type: ignore[arg-type]
            packed_bytes=packed_bytes,
        )

    def begin(self, packed_bytes: int) -> None:
        """Forget all replicas; messages have so much memory from now on."""
        self._writer.close()
        self._writer = self._made(packed_bytes)

    def layout(self) -> RankLayout:
        return self._writer.layout()

    async def connect(self, replica: int, route: Route | None) -> None:
        await asyncio.to_thread(self._writer.connect, replica, route)

    def label(self, version: int) -> float:
        """The shards now are `version`; the CPU time of this process so far."""
        self._writer.tensors.label(version)
        return time.process_time()

    def cpu_s(self) -> float:
        return time.process_time()

    async def write(self, version: int, handles: list[StagingHandle]) -> dict[str, int]:
        return await asyncio.to_thread(self._writer.write, version, handles)

    async def pack(self, routes: list[Route], version: int) -> float:
        """CPU seconds of writing to these routes, which lead nowhere, at the same time."""
        for route in routes:
            self._writer.connect(route.replica, route)
        start_s = self.label(version)
        await asyncio.gather(*(self.write(version, _nowhere(route, version)) for route in routes))
        return self.cpu_s() - start_s


def _nowhere(route: Route, version: int) -> list[StagingHandle]:
    return [
        StagingHandle(
            version=version,
            bucket=0,
            replica=route.replica,
            rank=rank,
            host="nowhere",
            address={source: [None] * 1000 for source in route.sources},
            num_bytes=0,
        )
        for rank in route.targets
    ]


class ReceivingReplica:
    """Both ranks of a replica, on a host of its own by name."""

    def __init__(self, model: Model, replica: int) -> None:
        self._buffers = []
        for rank in range(NUM_RANKS):
            layouts, num_elements = generator_layouts(model, rank)
            memory = Memory(
                parameters=layouts, num_elements=num_elements, dtype=DTYPES[model.dtype]
            )
            config = WeightsConfig(timeout_s=LIMIT_S)
            host = f"host-{replica}"
            self._buffers.append(
                WeightBuffer(memory, config, replica=replica, rank=rank, run_id="bench", host=host)
            )

    async def _each(self, call: Callable[[int], Any]) -> list[Any]:
        """Of both ranks at once."""
        return await asyncio.gather(*(asyncio.to_thread(call, i) for i in range(NUM_RANKS)))

    async def target_layout(self) -> list[RankLayout]:
        return [buffer.layout() for buffer in self._buffers]

    async def connect_source(self, route: SplitRoute) -> list[None]:
        return await self._each(lambda i: self._buffers[i].connect(route.for_rank(i)))

    async def prepare(self, version: int, bucket: int) -> list[StagingHandle]:
        return await self._each(lambda i: self._buffers[i].prepare(version, bucket))

    async def verify(self, version: int, bucket: int) -> list[dict[str, int]]:
        return await self._each(lambda i: self._buffers[i].verify(version, bucket))

    async def commit(self, version: int, bucket: int) -> list[int]:
        for buffer in self._buffers:
            buffer.commit(version, bucket)
        return [0, 0]

    async def abort(self, version: int) -> list[None]:
        return await self._each(lambda i: self._buffers[i].abort(version))


class Replica:
    """A replica in its process, as a publisher calls it."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._remote.call(name, *args)


async def bench_replicas(model: Model, numbers: Sequence[int], repeats: int, folder: str) -> Rounds:
    """The figures of each number of replicas and way, by repeat."""
    trainers = [Remote(SendingRank, model, rank) for rank in range(NUM_RANKS)]
    replicas = [Remote(ReceivingReplica, model, i) for i in range(max(numbers))]
    found: dict[str, list[Values]] = {}
    version = 0
    try:
        for number in numbers:
            for _, way in turns(WAYS, repeats):
                version += 2
                receiving = {i: Replica(replicas[i]) for i in range(number)}
                publish = await publish_to(trainers, receiving, WAYS[way], version, folder)
                packing_cpu_s = await pack_for(trainers, receiving, WAYS[way], version)
                case = f"{number} replica{'s' * (number > 1)}, {way}"
                found.setdefault(case, []).append(publish | {"packing_cpu_s": packing_cpu_s})
    finally:
        for remote in trainers + replicas:
            remote.close()
    return found


async def publish_to(
    trainers: list[Remote],
    receiving: dict[int, Replica],
    packed_bytes: int,
    version: int,
    folder: str,
) -> Values:
    """Connect the replicas and publish twice; figures of the second time."""
    await call_all(trainers, "begin", packed_bytes)
    config = WeightsConfig(transport="collective", timeout_s=LIMIT_S, straggler_timeout_s=LIMIT_S)
    publisher = Publisher(
        Trainer(trainers),
        receiving,  # type: ignore[arg-type]
        Spans("controller", None),
        config,
        rendezvous_folder=folder,
        kind_of=lambda replica: WeightKind(device="cpu"),
    )
    await publisher.connect()
    await call_all(trainers, "label", version)
    await publisher.publish(version)
    before_s = await call_all(trainers, "label", version + 1)
    stats = await publisher.publish(version + 1)
    after_s = await call_all(trainers, "cpu_s")
    await publisher.close()
    if stats.lost or len(stats.num_running) != len(receiving):
        raise RuntimeError(f"all {len(receiving)} replicas must take the version, got {stats}")
    used_s = [after - before for before, after in zip(before_s, after_s, strict=True)]
    return {"trainer_cpu_s": sum(used_s) / len(used_s), "publish_s": stats.seconds}


async def pack_for(
    trainers: list[Remote], receiving: dict[int, Replica], packed_bytes: int, version: int
) -> float:
    """CPU seconds of a trainer rank for the same messages, which go nowhere."""
    await call_all(trainers, "begin", packed_bytes)
    targets = await receiving[0].target_layout()
    copies = pack(plan(await call_all(trainers, "layout"), targets))
    used_s = []
    for rank, trainer in enumerate(trainers):
        routes = [
            split(copies, (), source="trainer", replica=replica, transport="rdma")[0].for_rank(rank)
            for replica in receiving
        ]
        used_s.append(await trainer.call("pack", routes, version))
    return sum(used_s) / len(used_s)
