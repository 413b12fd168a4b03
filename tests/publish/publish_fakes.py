"""A trainer and generators that model memory, for the tests of publishing."""

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


NUM_BYTES = len(NAMES) * 4 * 4
FOLDER = tempfile.gettempdir()  # nothing is written there


def layout(rank, host, *, start=0, stop=4):
    box = Box(start=(start,), stop=(stop,), buffer="weights", offset=0, strides=(1,))
    parameter = ParameterLayout(shape=(4,), dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host=host, parameters=dict.fromkeys(NAMES, parameter))


class World:
    """Fake executors and a publisher between them.

    `failures` says which call fails how, by (who, step) or step: an exception or "hang";
    `delay_s(who, step)` how long calls take. Replica i stands on `hosts[i]`.
    """

    def __init__(
        self,
        hosts=("h", "h"),
        *,
        spans=None,
        folder=FOLDER,
        device="cpu",
        far_sites=None,
        **fields,
    ):
        self.journal, self.events = [], []
        self.failures, self.delay_s = {}, lambda who, step: 0.0
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
        return sorted(self.publisher._syncs)

    def versions(self):
        return [generator.version for generator in self.generators.values()]


def whole(route):
    """A split route as one route with the copies of all ranks."""
    copies = [copy for rank in route.packed for copy in route.for_rank(rank).copies]
    return dataclasses.replace(route.route, copies=tuple(sorted(copies)))


class FakeSource:
    """What trainer and generators share: writing into prepared memory, remembering routes."""

    async def all(self, method, *args):
        return await getattr(self, method.__name__)(*args)

    async def connect_target(self, replica, route):
        self.routes[replica] = route and whole(route)
        await self.world.note(self.who, "connect_target", replica)
        return [None]

    async def write(self, version, handles):
        (handle,) = handles
        assert self.routes[handle.replica].source == self.who
        await self.world.note(self.who, "write", version, handle.replica)
        weights = self.weights(version)
        self.world.generators[handle.replica].staging = dict(weights)
        self.num_sent_bytes += num_bytes(self.routes[handle.replica].each())
        halves = {name: weights[name] * 10 for name in NAMES}
        return [halves, halves]


class FakeTrainer(FakeSource):
    """Two ranks with half of each parameter; the weights of a version are its number."""

    def __init__(self, world):
        self.world, self.who, self.routes = world, "trainer", {}
        self.version, self.num_sent_bytes = -1, 0

    async def source_layout(self):
        await self.world.note("trainer", "source_layout")
        halves = ((0, 0, 2), (1, 2, 4))
        return [layout(rank, "h", start=a, stop=b) for rank, a, b in halves]

    def weights(self, version):
        if version != self.version:
            raise StaleVersion(f"trainer is at {self.version}")
        return dict.fromkeys(NAMES, version)


class FakeGenerator(FakeSource):
    """A replica of one rank; `active` is name -> version.

    Once dead, by a call to `kill` or after `calls_left` calls, it answers nothing but errors.
    """

    def __init__(self, world, replica, host):
        self.world, self.replica, self.who, self.host = world, replica, f"generator-{replica}", host
        self.active, self.staging, self.prepared = dict.fromkeys(NAMES, -1), {}, None
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
        return [layout(0, self.host)]

    async def source_layout(self):
        await self.note("source_layout")
        return [layout(0, self.host)]

    async def connect_source(self, route):
        assert self.prepared is None
        self.route = whole(route)
        await self.note("connect_source", self.route.source)
        return [None]

    async def prepare(self, version):
        await self.note("prepare", version)
        assert self.prepared is None
        assert version > self.version
        self.prepared, self.staging = version, {}
        return [
            StagingHandle(
                version=version, replica=self.replica, rank=0, host=self.host, address=None,
                num_bytes=0,
            )
        ]  # fmt: skip

    async def verify(self, version):
        await self.note("verify", version)
        assert self.prepared == version
        assert set(self.staging) == set(NAMES)
        return [{name: value * 20 for name, value in self.staging.items()} | self.damage]

    async def commit(self, version):
        await self.note("commit", version)
        assert self.prepared == version
        self.active |= self.staging
        self.prepared = None
        return [3]

    async def abort(self, version):
        await self.note("abort", version)
        assert self.prepared == version
        self.prepared = None
        return [None]

    def weights(self, version):
        if set(self.active.values()) != {version}:
            raise StaleVersion(f"{self.who} is at {self.active}")
        return self.active

    async def write(self, version, handles):
        await self.note("pass_on", version)
        return await super().write(version, handles)
