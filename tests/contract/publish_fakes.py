"""A trainer and generators that model buckets and memory, for the tests of publishing."""

import asyncio
import dataclasses
import tempfile

from llamarl.core.config import WeightsConfig
from llamarl.core.errors import StaleVersion
from llamarl.metrics.span import Spans
from llamarl.publish.layout import Box, ParameterLayout, RankLayout, StagingHandle
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import WeightKind, num_bytes

NAMES = ("layers.0.weight", "layers.1.weight", "norm")


WHOLE, SINGLE = (NAMES,), tuple((name,) for name in NAMES)  # one bucket, a bucket per parameter


NUM_BYTES = len(NAMES) * 4 * 4
FOLDER = tempfile.gettempdir()  # nothing is written there


def layout(rank, host, buckets, *, start=0, stop=4):
    box = Box(start=(start,), stop=(stop,), buffer="weights", offset=0, strides=(1,))
    parameter = ParameterLayout(shape=(4,), dtype="float32", boxes=(box,))
    return RankLayout(
        rank=rank, host=host, parameters=dict.fromkeys(NAMES, parameter), buckets=buckets
    )


class World:
    """Fake executors and a publisher between them.

    `failures` says which call fails how, by (who, step) or step: an exception or "hang";
    `delay_s(who, step)` how long calls take. Replica i stands on `hosts[i]`.
    """

    def __init__(
        self,
        hosts=("h", "h"),
        *,
        buckets=WHOLE,
        spans=None,
        folder=FOLDER,
        device="cpu",
        far_sites=None,
        **fields,
    ):
        self.journal, self.events = [], []
        self.failures, self.delay_s = {}, lambda who, step: 0.0
        self.buckets = buckets
        self.trainer = FakeTrainer(self)
        self.generators = {i: FakeGenerator(self, i, host) for i, host in enumerate(hosts)}
        transport = "shared_memory" if {*hosts} == {"h"} else "collective"
        self.publisher = Publisher(
            self.trainer,
            dict(self.generators),
            spans or Spans("controller", None),
            WeightsConfig(
                **{"transport": transport, "straggler_timeout_s": 1.0, "timeout_s": 5.0} | fields
            ),
            rendezvous_folder=str(folder),
            kind_of=lambda replica: WeightKind(device=device),
            far_sites=far_sites,
            on_commit=lambda replica, version: self.events.append((replica, version)),
            on_lost=lambda replica, why: self.events.append((replica, str(why))),
        )

    async def note(self, who, step, *entry):
        self.journal.append((who, step, *entry))
        await asyncio.sleep(self.delay_s(who, step))
        failure = self.failures.get((who, step), self.failures.get(step))
        if failure == "hang":
            await asyncio.Event().wait()
        elif failure is not None:
            raise failure

    async def connected(self):
        await self.publisher.connect()
        self.journal.clear()
        return self

    async def publish(self, version):
        self.trainer.version = version
        return await self.publisher.publish(version)

    def steps(self, who):
        return [entry[1] for entry in self.journal if entry[0] == who]

    def connected_replicas(self):
        return sorted(self.publisher._replicas.syncs)

    def versions(self):
        return [generator.version for generator in self.generators.values()]


def whole(route):
    """A split route as one route with the copies of all ranks."""
    copies = [copy for rank in route.packed for copy in route.for_rank(rank).copies]
    return dataclasses.replace(route.route, copies=tuple(sorted(copies)))


class FakeSource:
    """What trainer and generators share: writing into prepared memory, remembering routes."""

    async def connect_target(self, replica, route):
        self.routes[replica] = route and whole(route)
        await self.world.note(self.who, "connect_target", replica)
        return [None]

    async def write(self, version, handles):
        (handle,) = handles
        assert self.routes[handle.replica].source == self.who
        await self.world.note(self.who, "write", version, handle.replica, handle.bucket)
        weights = self.weights(version)
        target = self.world.generators[handle.replica]
        names = self.world.buckets[handle.bucket]
        target.staging = {name: weights[name] for name in names}
        self.num_sent_bytes += num_bytes(
            single
            for copy in self.routes[handle.replica].copies
            for single in copy.each()
            if single.name in names
        )
        halves = {name: weights[name] * 10 for name in names}
        return [halves, halves]


class FakeTrainer(FakeSource):
    """Two ranks with half of each parameter; the weights of a version are its number."""

    def __init__(self, world):
        self.world, self.who, self.routes = world, "trainer", {}
        self.version, self.num_sent_bytes = -1, 0

    async def source_layout(self):
        await self.world.note("trainer", "source_layout")
        halves = ((0, 0, 2), (1, 2, 4))
        return [layout(rank, "h", WHOLE, start=a, stop=b) for rank, a, b in halves]

    def weights(self, version):
        if version != self.version:
            raise StaleVersion(f"trainer is at {self.version}")
        return dict.fromkeys(NAMES, version)


class FakeGenerator(FakeSource):
    """A replica of one rank with staging memory for one bucket; `active` is name -> version.

    Once dead, by a call to `kill` or after `calls_left` calls, it answers nothing but errors.
    """

    def __init__(self, world, replica, host):
        self.world, self.replica, self.who, self.host = world, replica, f"generator-{replica}", host
        self.active, self.staging, self.prepared = dict.fromkeys(NAMES, -1), {}, None
        self.committed = 0
        self.routes, self.route, self.num_sent_bytes = {}, None, 0
        self.damage = {}
        self.calls_left = None

    @property
    def version(self):
        """The active version; a replica that decodes has one for all parameters."""
        (version,) = set(self.active.values())
        return version

    async def note(self, step, *entry):
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise ConnectionError("dead")
            self.calls_left -= 1
        await self.world.note(self.replica, step, *entry)

    async def target_layout(self):
        await self.note("target_layout")
        return [layout(0, self.host, self.world.buckets)]

    async def source_layout(self):
        await self.note("source_layout")
        return [layout(0, self.host, WHOLE)]

    async def connect_source(self, route):
        assert self.prepared is None
        self.route = whole(route)
        await self.note("connect_source", self.route.source)
        return [None]

    async def prepare(self, version, bucket):
        await self.note("prepare", version, bucket)
        assert self.prepared is None
        assert bucket == self.committed
        assert version > self.active[self.world.buckets[bucket][0]]
        self.prepared, self.staging = (version, bucket), {}
        return [
            StagingHandle(
                version=version, bucket=bucket, replica=self.replica, rank=0, host=self.host,
                address=None, num_bytes=0,
            )
        ]  # fmt: skip

    async def verify(self, version, bucket):
        await self.note("verify", version, bucket)
        assert self.prepared == (version, bucket)
        assert set(self.staging) == set(self.world.buckets[bucket])
        return [{name: value * 20 for name, value in self.staging.items()} | self.damage]

    async def commit(self, version, bucket):
        await self.note("commit", version, bucket)
        assert self.prepared == (version, bucket)
        self.active |= self.staging
        self.committed = (bucket + 1) % len(self.world.buckets)
        self.prepared = None
        return [3]

    async def abort(self, version):
        await self.note("abort", version)
        assert self.prepared is not None
        assert self.prepared[0] == version
        if self.committed:
            self.calls_left = 0
            raise RuntimeError("half-committed")
        self.prepared = None
        return [None]

    def weights(self, version):
        if set(self.active.values()) != {version}:
            raise StaleVersion(f"{self.who} is at {self.active}")
        return self.active

    async def write(self, version, handles):
        await self.note("pass_on", version)
        return await super().write(version, handles)
