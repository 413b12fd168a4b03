"""Publishing on fakes that model buckets: who sends what when, and what a failure leaves behind."""

import asyncio
import gc
import json
import random
from collections import Counter
from itertools import chain, pairwise

import pytest

from llamarl.config import WeightsConfig
from llamarl.errors import FingerprintMismatch, ReplicaLost, StaleVersion, TargetLost
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.weights.integrity.comparison import compare
from llamarl.weights.layout.boxes import Box, ParameterLayout, RankLayout, StagingHandle
from llamarl.weights.layout.reshard import num_bytes
from llamarl.weights.sync import publisher, replica_sync
from llamarl.weights.sync.calls import Stagger
from llamarl.weights.sync.publisher import Publisher

NAMES = ("layers.0.weight", "layers.1.weight", "norm")
WHOLE, SINGLE = (NAMES,), tuple((name,) for name in NAMES)  # one bucket, a bucket per parameter
NUM_BYTES = len(NAMES) * 4 * 4


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
        folder="unused",
        device="cpu",
        **fields,
    ):
        self.journal, self.events = [], []
        self.failures, self.delay_s = {}, lambda who, step: 0.0
        self.buckets = buckets
        self.trainer = FakeTrainer(self)
        self.generators = {i: FakeGenerator(self, i, host) for i, host in enumerate(hosts)}
        transport = "shared_memory" if {*hosts} == {"h"} else "rdma"
        self.publisher = Publisher(
            self.trainer,
            dict(self.generators),
            spans or Spans("controller", None),
            WeightsConfig(
                **{"transport": transport, "straggler_timeout_s": 1.0, "timeout_s": 5.0} | fields
            ),
            rendezvous_folder=str(folder),
            generator_device=device,
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

    def versions(self):
        return [generator.version for generator in self.generators.values()]


class FakeSource:
    """What trainer and generators share: writing into prepared memory, remembering routes."""

    async def connect_target(self, replica, route):
        self.routes[replica] = route
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
            copy for copy in self.routes[handle.replica].copies if copy.name in names
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
        self.route = route
        await self.note("connect_source", route.source)
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


def test_one_replica_feeds_the_others_of_its_host_and_the_trainer_only_the_first() -> None:
    async def main():
        world = World(("h",) * 3)
        await world.publisher.connect()
        first = world.journal.index(("trainer", "connect_target", 0))
        assert ("generator-2", "connect_target", 2) not in world.journal[:first]
        routes = [world.generators[i].route for i in range(3)]
        assert [route.source for route in routes] == ["trainer", "generator-0", "generator-0"]
        assert {route.transport for route in routes} == {"shared_memory"}
        assert world.trainer.routes == {0: routes[0]}
        assert world.generators[0].routes == {1: routes[1], 2: routes[2]}
        world.journal.clear()
        stats = await world.publish(7)
        for replica in range(3):
            assert world.steps(replica)[:4] == ["prepare", "verify", "commit"] + ["pass_on"] * (
                replica == 0
            )
        writes = [entry for entry in world.journal if entry[1] in ("write", "commit")]
        assert writes[:2] == [("trainer", "write", 7, 0, 0), (0, "commit", 7, 0)]
        assert world.versions() == [7, 7, 7]
        assert (stats.version, stats.lost, stats.num_running) == (7, {}, {0: 3, 1: 3, 2: 3})
        assert (stats.num_bytes, stats.num_relayed_bytes) == (NUM_BYTES, 2 * NUM_BYTES)
        assert stats.seconds >= 0
        assert sorted(world.events) == [(0, 7), (1, 7), (2, 7)]

    run(main())


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
@pytest.mark.parametrize("hosts", [("a",) * 3, ("a", "b", "a", "b", "b", "a")])
def test_each_byte_leaves_the_trainer_once_per_host(hosts, buckets) -> None:
    async def main():
        world = await World(hosts, buckets=buckets, transport="rdma").connected()
        for version in range(5):
            stats = await world.publish(version)
            assert stats.num_bytes == NUM_BYTES * len({*hosts})
            assert stats.num_relayed_bytes == NUM_BYTES * (len(hosts) - len({*hosts}))
        assert world.trainer.num_sent_bytes == 5 * NUM_BYTES * len({*hosts})
        sent = sum(generator.num_sent_bytes for generator in world.generators.values())
        assert sent == 5 * NUM_BYTES * (len(hosts) - len({*hosts}))
        assert world.versions() == [4] * len(hosts)

    run(main())


@pytest.mark.parametrize(
    ("transport", "device", "relay"),
    [
        ("collective", "cpu", "shared_memory"),
        ("collective", "cuda", "cuda_ipc"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
    ],
)
def test_routes_say_what_carries_the_bytes_and_collective_ones_meet_at_a_new_path(
    transport, device, relay, tmp_path
) -> None:
    async def main():
        folder = tmp_path / "rendezvous"
        world = World(transport=transport, device=device, folder=folder, bucket_bytes=77)
        await world.publisher.connect()
        first, second = (generator.route for generator in world.generators.values())
        assert (first.transport, second.transport) == (transport, relay)
        assert (second.rendezvous, first.bucket_bytes) == ("", 77)
        if transport == "collective":
            await world.publisher.connect_replica(0, world.generators[0])
            await world.publisher.connect_replica(1, world.generators[1])
            again = world.generators[0].route
            assert again.source == "generator-1" or again.rendezvous != first.rendezvous
            paths = [first.rendezvous, world.generators[1].route.rendezvous]
            assert all(path.startswith(f"{folder}/") for path in paths if path)
            assert folder.is_dir()
            assert list(folder.iterdir()) == []

    run(main())


def test_shared_memory_never_leaves_a_host_and_nothing_is_connected_before_all_fit() -> None:
    async def main():
        world = World(("h", "other"), transport="shared_memory")
        with pytest.raises(ValueError, match=r"collective or rdma.*trainer on h .*1 on other"):
            await world.publisher.connect()
        assert not {entry[1] for entry in world.journal} & {"connect_target", "connect_source"}

    run(main())


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ([layout(0, "h", WHOLE), layout(1, "h", SINGLE)], "buckets must be equal .* generator 1"),
        ([layout(0, "h", (NAMES[:2],))], "norm in 0"),
        ([layout(0, "h", (*WHOLE, ("odd",)))], "odd in 1, which no rank holds"),
        ([layout(0, "h", (*WHOLE, NAMES[:1]))], "layers.0.weight in 2"),
        ([RankLayout(rank=0, host="h", parameters={}, buckets=())], NAMES[0]),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_when_connecting(layouts, message) -> None:
    async def main():
        world = World()

        async def other_layout():
            return layouts

        world.generators[1].target_layout = other_layout
        with pytest.raises(ValueError, match=message):
            await world.publisher.connect()

    run(main())


@pytest.mark.parametrize("step", ["source_layout", "connect_target", "connect_source"])
def test_an_error_while_connecting_at_the_start_is_raised_as_it_is(step) -> None:
    async def main():
        for failure in (MemoryError("own"), "hang"):
            world = World()
            world.failures[step] = failure
            match = "own" if failure != "hang" else r"must .* within weights\.timeout_s=5 s"
            with pytest.raises((MemoryError, TimeoutError, ReplicaLost), match=match):
                await world.publisher.connect()

    run(main())


def test_both_ends_of_a_route_are_connected_at_the_same_time() -> None:
    async def main():
        world = World(("h",))
        ends = asyncio.Barrier(2)
        for fake, name in (
            (world.trainer, "connect_target"),
            (world.generators[0], "connect_source"),
        ):

            async def meet(*args):
                await ends.wait()

            setattr(fake, name, meet)
        await world.publisher.connect()

    run(main())


def test_buckets_are_prepared_written_verified_and_committed_one_after_the_other() -> None:
    async def main():
        world = await World(buckets=SINGLE).connected()
        await world.publish(0)
        assert world.steps(1) == ["prepare", "verify", "commit"] * 3
        first = [entry for entry in world.journal if entry[0] in (0, "trainer")]
        buckets = [(entry[1], entry[-1]) for entry in first if entry[1] != "pass_on"]
        steps = ("prepare", "write", "verify", "commit")
        assert buckets == [(step, bucket) for bucket in range(3) for step in steps]

    run(main())


@pytest.mark.parametrize("commit_s", [0.1, 1.0])
def test_replicas_commit_one_by_one_but_a_slow_one_holds_the_others_only_for_a_moment(
    commit_s,
) -> None:
    async def main():
        world = await World("abc", buckets=SINGLE, straggler_timeout_s=60.0).connected()
        num_commits, starts = Counter(), {}

        async def note(who, step, *entry):
            if step == "commit":
                starts.setdefault(who, asyncio.get_running_loop().time())
                num_commits[who] += 1
                others = [n for other, n in num_commits.items() if other != who]
                assert commit_s > 0.1 or set(others) <= {0, 3}
                await asyncio.sleep(commit_s)

        world.note = note
        await world.publish(0)
        assert world.versions() == [0, 0, 0]
        gaps = [b - a for a, b in pairwise(sorted(starts.values()))]
        assert gaps == pytest.approx([min(3 * commit_s, publisher.COMMIT_S)] * 2)

    run(main())


def test_a_stuck_turn_ends_after_its_limit_and_is_not_given_back_twice() -> None:
    async def main():
        stagger, order = Stagger(0.5), []

        async def hold(name, seconds):
            async with stagger.alone():
                order.append((name, asyncio.get_running_loop().time()))
                await asyncio.sleep(seconds)

        await asyncio.gather(*(hold(i, seconds) for i, seconds in enumerate((2.0, 0.2, 0.2, 0.2))))
        assert order == [(i, pytest.approx(t)) for i, t in enumerate((0.0, 0.5, 0.7, 0.9))]

    run(main())


def test_a_slow_replica_holds_no_other_and_catches_up_with_the_newest() -> None:
    async def main():
        world = await World(("h",) * 3, timeout_s=60.0).connected()
        clock = asyncio.get_running_loop().time
        world.delay_s = lambda who, step: 10.0 * ((who, step) == (1, "prepare"))
        for version in range(5):
            start_s = clock()
            stats = await world.publish(version)
            assert clock() - start_s == pytest.approx(1.0), (
                "the timeout for stragglers, not the slow replica"
            )
            assert stats.num_running == {0: 3, 2: 3}
        world.delay_s = lambda who, step: 0.0
        await asyncio.sleep(20)
        assert world.versions() == [4, 4, 4]
        assert [v for r, v in world.events if r == 1][-1] == 4
        assert len([v for r, v in world.events if r == 1]) <= 2, "it skipped what was overtaken"
        stats = await world.publish(5)
        assert stats.num_running == {0: 3, 1: 3, 2: 3}
        assert stats.num_relayed_bytes >= 3 * NUM_BYTES, "the commits between publishes count too"

    run(main())


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
@pytest.mark.parametrize("failure", [ValueError("broken"), "hang"])
@pytest.mark.parametrize("step", ["prepare", "verify", "commit"])
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_that_fails_at_any_step_is_lost_and_the_others_are_published(
    replica, step, failure, buckets
) -> None:
    async def main():
        world = await World(("h",) * 3, buckets=buckets, straggler_timeout_s=60.0).connected()
        await world.publish(0)
        world.events.clear()
        world.failures[replica, step] = failure
        stats = await world.publish(1)
        others = [i for i in range(3) if i != replica]
        assert [world.generators[i].version for i in others] == [1, 1]
        assert world.generators[replica].version == 0
        assert list(stats.lost) == [replica]
        assert stats.num_running == dict.fromkeys(others, 3)
        assert f"generator {replica} failed at {step}" in str(stats.lost[replica])
        assert failure != "hang" or "must end within" in str(stats.lost[replica])
        assert isinstance(stats.lost[replica], ReplicaLost)
        assert failure == "hang" or stats.lost[replica].__cause__ is failure
        expected = [(i, 1) for i in others] + [(replica, str(stats.lost[replica]))]
        assert sorted(world.events, key=str) == sorted(expected, key=str)
        assert world.publisher.replicas == others
        source = world.generators[0] if replica else world.trainer
        await asyncio.sleep(0.1)
        assert source.routes[replica] is None, "its memory is unmapped"
        world.journal.clear()
        await world.publish(2)
        assert world.steps(replica) == []
        assert [world.generators[i].version for i in others] == [2, 2]

    run(main())


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
def test_a_replica_killed_between_any_two_calls_has_the_old_version_or_is_lost(buckets) -> None:
    async def main(replica, num_calls):
        world = await World(("h",) * 3, buckets=buckets).connected()
        await world.publish(0)
        victim = world.generators[replica]
        victim.calls_left = num_calls
        for version in (1, 2):
            await world.publish(version)
        for each in world.publisher.replicas:
            assert world.generators[each].version == 2
        for each in {0, 1, 2} - {replica, *world.publisher.replicas}:
            assert world.generators[each].committed > 0, "its head died amid its commit"
        if len(buckets) == 1:
            assert victim.version in (0, 1, 2), "what it decodes with is whole"
        return replica in world.publisher.replicas

    for replica in (0, 1):
        ends = [run(main(replica, num_calls)) for num_calls in range(40)]
        assert ends[0] is False
        assert ends[-1] is True
        assert ends == sorted(ends), "each call of two publishes was the last one once"


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
def test_a_failure_before_the_first_commit_is_aborted_and_after_it_the_replica_is_lost(
    buckets,
) -> None:
    async def main():
        world = await World(buckets=buckets).connected()
        await world.publish(0)
        relay, writes = world.generators[0], []

        async def write(version, handles):
            writes.append(handles[0].bucket)
            if handles[0].bucket == len(buckets) - 1:
                raise StaleVersion("gone on")
            return await FakeGenerator.write(relay, version, handles)

        relay.write = write
        stats = await world.publish(1)
        assert relay.version == 1
        if len(buckets) == 1:
            assert world.publisher.replicas == [0, 1]
            assert world.generators[1].version == 0
            assert "abort" in world.steps(1)
            await world.publisher.drop(0)
            await asyncio.sleep(1)
            assert world.generators[1].version == 1, "the trainer still has it"
        else:
            assert list(stats.lost) == [1]
            assert "gone on, amid generator 1's commit" in str(stats.lost[1])
            assert world.generators[1].calls_left == 0, "it was aborted"

    run(main())


def test_when_the_head_of_a_host_is_lost_the_next_replica_takes_its_place() -> None:
    async def main():
        for silent in (False, True):
            world = await World("abbb", straggler_timeout_s=60.0).connected()
            await world.publish(0)
            assert [world.generators[i].route.source for i in (1, 2, 3)] == [
                "trainer", "generator-1", "generator-1",
            ]  # fmt: skip
            world.failures[1, "pass_on"] = "hang" if silent else ConnectionError("dead")
            stats = await world.publish(1)
            assert list(stats.lost) == [1], "the head, not those that it should feed"
            assert "generator-1" in str(stats.lost[1])
            assert world.publisher.replicas == [0, 2, 3]
            assert [world.generators[i].version for i in (0, 2, 3)] == [1, 1, 1]
            assert world.generators[2].route.source == "trainer"
            assert world.generators[3].route.source == "generator-2"
            stats = await world.publish(2)
            assert (stats.num_bytes, stats.num_relayed_bytes) == (2 * NUM_BYTES, NUM_BYTES)
            await world.publisher.drop(2)
            await world.publish(3)
            assert [world.generators[i].version for i in (0, 1, 2, 3)] == [3, 1, 2, 3]
            assert world.generators[3].route.source == "trainer"

    run(main())


def test_a_replica_that_joins_or_comes_back_gets_the_newest_version() -> None:
    async def main():
        world = await World().connected()
        world.failures[0, "prepare"] = ConnectionError("gone")
        await world.publish(0)
        world.failures.clear()
        for replica in (0, 5):
            world.generators[replica] = FakeGenerator(world, replica, "h")
            await world.publisher.connect_replica(replica, world.generators[replica])
        await asyncio.sleep(1)
        assert world.versions() == [0, 0, 0]
        await world.publish(1)
        assert world.versions() == [1, 1, 1]
        assert world.generators[0].route.source == "generator-1"

    run(main())


def test_a_version_that_its_source_has_no_more_is_aborted_and_the_next_one_taken() -> None:
    async def main():
        world = await World("ab").connected()
        await world.publish(0)
        world.delay_s = lambda who, step: 4.0 * ((who, step) == (1, "prepare"))
        await world.publish(1)  # returns after the timeout for stragglers
        world.trainer.version = 2  # the trainer steps
        await asyncio.sleep(10)
        assert world.steps(1)[-2:] == ["abort", "connect_source"], "nothing old may arrive later"
        assert world.versions() == [1, 0]
        world.delay_s = lambda who, step: 0.0
        await world.publish(2)
        assert world.versions() == [2, 2]

    run(main())


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
def test_a_publish_that_the_trainer_has_overtaken_ends_without_commits(hosts) -> None:
    async def main():
        world = await World(hosts).connected()
        world.trainer.version = 1
        stats = await world.publisher.publish(0)
        assert (stats.num_running, stats.lost, stats.num_bytes) == ({}, {}, 0)
        await world.publish(1)
        assert world.versions() == [1] * len(hosts)

    run(main())


def test_a_publish_in_buckets_waits_for_those_that_the_trainer_feeds_and_no_others() -> None:
    async def main():
        world = await World("abb", buckets=SINGLE, timeout_s=60.0).connected()
        await world.publish(0)
        slow = 1
        world.delay_s = lambda who, step: 3.0 * (who == slow and step != "pass_on")
        for version in (1, 2):
            await world.publish(version)
            assert [world.generators[i].version for i in (0, 1)] == [version] * 2
            world.trainer.version += 1  # the trainer steps: no replica may need the old one
        await asyncio.sleep(20)
        slow = 2
        start_s = asyncio.get_running_loop().time()
        await world.publish(3)
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(1.0)
        assert world.versions()[:2] == [3, 3]
        await asyncio.sleep(60)
        assert world.versions() == [3, 3, 3]

    run(main())


def test_a_replica_with_buckets_that_joins_too_late_for_a_version_waits_for_the_next() -> None:
    async def main():
        world = await World("a", buckets=SINGLE, straggler_timeout_s=0.0).connected()
        await world.publish(0)
        world.delay_s = lambda who, step: {"commit": 0.5, "verify": 1.0}.get(step, 0.0)
        world.trainer.version = 1
        publishing = asyncio.create_task(world.publish(1))
        await asyncio.sleep(4)
        world.generators[1] = FakeGenerator(world, 1, "b")
        await world.publisher.connect_replica(1, world.generators[1])
        await publishing
        world.trainer.version = 2
        await asyncio.sleep(10)
        assert world.versions() == [1, -1]
        assert "abort" in world.steps(1)
        await world.publisher.connect_replica(1, world.generators[1])
        num_steps = len(world.steps(1))
        await asyncio.sleep(10)
        assert len(world.steps(1)) == num_steps, "it does not even try"
        stats = await world.publish(2)
        assert (world.versions(), stats.lost) == ([2, 2], {})

    run(main())


def test_a_head_does_not_change_while_others_take_it_over_bucket_by_bucket() -> None:
    async def main():
        world = await World(
            "aaa", buckets=SINGLE, straggler_timeout_s=0.0, transport="rdma"
        ).connected()
        world.delay_s = lambda who, step: 0.7 * (who in (1, 2) and step == "commit")
        for version in range(12):
            stats = await world.publish(version)
            assert stats.lost == {}
        await asyncio.sleep(20)
        assert world.versions() == [11, 11, 11]

    run(main())


def test_a_target_that_the_source_cannot_reach_is_lost_alone() -> None:
    async def main():
        for who, replica in (("trainer", 0), ("generator-0", 1)):
            world = await World(("h",) * 3).connected()
            world.failures[who, "write"] = TargetLost("connection reset")
            world.generators[2].host = "h"
            if who == "generator-0":
                world.failures[2, "prepare"] = "hang"
            else:
                world.failures.pop((who, "write"))
                write = world.trainer.write

                async def once(version, handles, write=write):
                    if handles[0].replica == 0:
                        raise TargetLost("connection reset")
                    return await write(version, handles)

                world.trainer.write = once
            stats = await world.publish(0)
            assert replica in stats.lost
            assert "connection reset" in str(stats.lost[replica])
            assert (0 in stats.lost) == (replica == 0)

    run(main())


def test_losing_the_last_replica_stops_the_run_with_its_error() -> None:
    async def main():
        world = await World(("h",)).connected()
        world.failures[0, "prepare"] = ConnectionError("gone")
        with pytest.raises(RuntimeError, match="no generator took version 0") as caught:
            await world.publish(0)
        assert isinstance(caught.value.__cause__.__cause__, ConnectionError)
        with pytest.raises(RuntimeError, match="connected generator") as caught:
            await world.publish(1)
        assert isinstance(caught.value.__cause__, ReplicaLost)

    run(main())


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
def test_a_wrong_fingerprint_stops_the_run_names_everything_and_never_commits(buckets) -> None:
    async def main():
        world = await World("ab", buckets=buckets).connected()
        await world.publish(0)
        world.generators[1].damage = {NAMES[0]: 12345}
        with pytest.raises(FingerprintMismatch) as caught:
            await world.publish(1)
        for word in (NAMES[0], "generator 1", "version 1", f"{12345:016x}", f"{20:016x}"):
            assert word in str(caught.value)
        assert NAMES[1] not in str(caught.value)
        assert world.generators[1].version == 0
        assert world.steps(1)[-1] == "abort"
        assert world.generators[1].prepared is None

    run(main())


def test_what_a_relay_passes_on_is_compared_with_what_the_trainer_wrote() -> None:
    async def main():
        world = await World(("h",) * 2).connected()
        await world.publish(0)
        commit = world.generators[0].commit

        async def rotten(version, bucket):
            answer = await commit(version, bucket)
            world.generators[0].active["norm"] = 77  # memory changes after it was verified
            world.generators[0].weights = lambda version: world.generators[0].active
            return answer

        world.generators[0].commit = rotten
        with pytest.raises(FingerprintMismatch) as caught:
            await world.publish(1)
        assert "generator 1 from the trainer through generator-0: norm must" in str(caught.value)
        assert f"{20:016x}, got {77 * 20:016x}" in str(caught.value)
        assert world.generators[1].version == 0

        world = await World(("h",) * 3).connected()
        world.generators[2].damage = {"norm": 5}
        with pytest.raises(FingerprintMismatch, match="generator 2 from generator-0: norm"):
            await world.publish(1)

    run(main())


def test_all_wrong_parameters_are_named_up_to_a_limit() -> None:
    written = {f"p{i}": i for i in range(10)}
    with pytest.raises(FingerprintMismatch, match=r": p0, p1, .*p7 and 2 more must"):
        compare(written, dict.fromkeys(written, 77), 0, 1)
    with pytest.raises(FingerprintMismatch, match=r": p3, unknown must .*0003, got none"):
        compare({"p3": 3, "p4": 4}, {"p4": 4, "unknown": 5}, 0, 1)


def test_an_error_of_the_trainer_is_raised_at_once_as_it_is_and_nothing_commits() -> None:
    async def main():
        world = await World("ab", timeout_s=60.0).connected()
        await world.publish(0)
        watching = asyncio.create_task(world.publisher.watch())
        world.journal.clear()
        error = MemoryError("a trainer's own")
        world.failures["trainer", "write"] = error
        world.failures[1, "prepare"] = "hang"  # must not hold the error back
        with pytest.raises(MemoryError) as caught:
            await asyncio.wait_for(world.publish(1), timeout=5)
        assert caught.value is error
        assert world.versions() == [0, 0]
        assert world.steps(0) == ["prepare", "abort"]
        with pytest.raises(MemoryError):
            await watching
        with pytest.raises(MemoryError):
            await world.publish(2)

    run(main())


@pytest.mark.parametrize("transport", ["shared_memory", "rdma", "collective"])
def test_a_silent_trainer_ends_the_run_in_time(transport, tmp_path) -> None:
    async def main():
        world = await World(transport=transport, folder=tmp_path).connected()
        world.failures["trainer", "write"] = world.failures["trainer", "source_layout"] = "hang"
        with pytest.raises(TimeoutError, match=r"trainer write must end within .*5 s"):
            await world.publish(0)
        assert world.versions() == [-1, -1]
        assert {generator.prepared for generator in world.generators.values()} == {None}

    run(main())


def test_a_replica_at_which_the_write_of_a_living_trainer_hangs_is_lost() -> None:
    async def main():
        world = await World("ab").connected()
        write = world.trainer.write

        async def stuck(version, handles):
            await asyncio.sleep(1000 * (handles[0].replica == 1))
            return await write(version, handles)

        world.trainer.write = stuck
        await world.publish(0)
        await asyncio.sleep(20)
        assert world.versions() == [0, -1]
        stats = await world.publish(1)
        assert "generator 1 must take what trainer writes within" in str(stats.lost[1])

    run(main())


@pytest.mark.parametrize("error", [MemoryError("own"), None])
def test_an_error_of_a_replica_in_the_background_surfaces(error) -> None:
    async def main():
        world = await World("ab", timeout_s=60.0).connected()
        await world.publish(0)
        watching = asyncio.create_task(world.publisher.watch())
        world.delay_s = lambda who, step: 5.0 * ((who, step) == (1, "prepare"))
        await world.publish(1)
        if error is None:
            world.generators[1].damage = {"norm": 5}
        else:
            world.failures["trainer", "write"] = error
        kind = FingerprintMismatch if error is None else MemoryError
        with pytest.raises(kind):
            await watching
        with pytest.raises(kind):
            await world.publish(2)
        assert world.versions() == [1, 0]

    run(main())


@pytest.mark.parametrize("failure", ["hang", OSError("too")])
def test_an_abort_that_fails_does_not_hide_or_delay_the_error(failure, monkeypatch, caplog) -> None:
    monkeypatch.setattr(replica_sync, "ABORT_S", 0.05)

    async def main():
        world = await World(("h",), timeout_s=60.0).connected()
        world.failures["trainer", "write"] = MemoryError("a trainer's own")
        world.failures[0, "abort"] = failure
        with pytest.raises(MemoryError):
            await asyncio.wait_for(world.publish(0), timeout=1)
        assert world.steps(0) == ["prepare", "abort"]

    run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_loss_is_reported_while_other_replicas_are_busy() -> None:
    async def main():
        world = await World("ab").connected()
        world.failures[1, "prepare"] = ConnectionError("gone")
        world.failures[0, "commit"] = "hang"
        task = asyncio.create_task(world.publish(0))
        while not world.events:
            await asyncio.sleep(0.01)
        assert world.events[0][0] == 1
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_versions_go_up_and_publishes_go_one_by_one() -> None:
    async def main():
        world = World()
        with pytest.raises(RuntimeError, match="connected generator"):
            await world.publish(0)
        await world.connected()
        await world.publish(3)
        for version in (3, 2):
            with pytest.raises(RuntimeError, match="newer than 3"):
                await world.publish(version)
        replica = world.publisher._replicas.syncs[0]
        for version in (3, 2):
            with pytest.raises(RuntimeError, match="newer than 3, which generator 0 has"):
                await replica.update(version)
        running = asyncio.create_task(world.publish(4))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="must wait"):
            await world.publisher.publish(5)
        await running
        await world.publish(5)
        assert world.versions() == [5, 5]

    run(main())


def test_a_replica_that_is_dropped_while_it_is_written_to_is_forgotten_after_its_abort() -> None:
    async def main():
        world = await World("abc").connected()
        world.failures["verify"] = "hang"
        world.delay_s = lambda who, step: 0.5 * (step == "abort")
        task = asyncio.create_task(world.publish(0))
        await asyncio.sleep(1)
        await world.publisher.drop(1)
        assert world.journal[-2:] == [(1, "abort", 0), ("trainer", "connect_target", 1)]
        world.failures["trainer", "connect_target"] = MemoryError("own")
        await world.publisher.drop(0)
        with pytest.raises(MemoryError):
            await world.publisher.watch()
        with pytest.raises(MemoryError):
            await task

    run(main())


def test_closing_ends_the_tasks_and_aborts_what_was_prepared() -> None:
    async def main():
        world = await World("ab").connected()
        world.failures["trainer", "write"] = "hang"
        task = asyncio.create_task(world.publish(0))
        await asyncio.sleep(1)
        await world.publisher.close()
        assert [world.steps(replica) for replica in (0, 1)] == [["prepare", "abort"]] * 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.mark.parametrize("num_publishes", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
def test_healthy_publishes_with_random_delays_raise_nothing(num_publishes, buckets) -> None:
    async def main():
        rng = random.Random(0)
        world = await World("aabbb", buckets=buckets, straggler_timeout_s=0.05).connected()
        world.delay_s = lambda who, step: rng.choice((0.0, 0.001, 0.02, rng.random() * 0.2))
        watching = asyncio.create_task(world.publisher.watch())
        for version in range(num_publishes):
            stats = await world.publish(version)
            assert stats.lost == {}
            world.trainer.version += rng.random() < 0.2  # steps before the next publish, or not
            await asyncio.sleep(rng.random() * 0.1)
        world.trainer.version = num_publishes
        await world.publisher.publish(num_publishes)
        await asyncio.sleep(60)
        assert world.versions() == [num_publishes] * 5
        order = [[v for r, v in world.events if r == replica] for replica in range(5)]
        assert all(versions == sorted(set(versions)) for versions in order)
        assert set(chain(*order)) <= set(range(num_publishes + 1))
        assert not watching.done()

    run(main())


@pytest.mark.parametrize("buckets", [WHOLE, SINGLE])
def test_whichever_replica_dies_the_others_get_to_the_newest_version(buckets) -> None:
    async def main(seed):
        rng = random.Random(seed)
        world = await World(
            "aabbb", buckets=buckets, straggler_timeout_s=0.05, timeout_s=2.0
        ).connected()
        world.delay_s = lambda who, step: rng.choice((0.0, 0.001, 0.02, rng.random() * 0.3))
        victims = {2, 3} if seed % 2 else {0, 3}
        for victim in victims:
            world.generators[victim].calls_left = rng.randrange(80)
        watching = asyncio.create_task(world.publisher.watch())
        for version in range(12):
            await world.publish(version)
            world.trainer.version += rng.random() < 0.5  # the trainer may step at once
            if rng.random() < 0.2:
                who = rng.choice(world.publisher.replicas)
                world.generators[who] = FakeGenerator(world, who, world.generators[who].host)
                await world.publisher.connect_replica(who, world.generators[who])
                world.generators[who].calls_left = None
            await asyncio.sleep(rng.random() * 0.2)
        world.trainer.version = 12
        world.delay_s = lambda who, step: 0.01
        await world.publisher.publish(12)
        await asyncio.sleep(10)
        assert not watching.done()
        whole = world.publisher.replicas
        assert [world.generators[i].version for i in whole] == [12] * len(whole)
        lost = set(range(5)) - set(whole)
        assert len(buckets) > 1 or lost <= victims
        assert all(world.generators[i].committed or i in victims for i in lost)
        sources = {world.generators[i].host: world.generators[i].route.source for i in whole}
        fed = [world.generators[i] for i in whole if world.generators[i].route.source == "trainer"]
        assert sorted(generator.host for generator in fed) == sorted(sources)

    for seed in range(30):
        run(main(seed))


def test_a_publish_is_one_span_and_each_replica_has_its_own(tmp_path) -> None:
    spans = Spans("controller", tmp_path)

    async def main():
        world = await World(spans=spans).connected()
        await world.publish(4)

    run(main())
    spans.close()
    lines = map(json.loads, (tmp_path / "controller.jsonl").read_text().splitlines())
    found = [line for line in lines if line.get("name") == "publish"]
    assert [(span["cat"], span["version"], span.get("replica")) for span in found] == [
        ("publish", 4, 0), ("publish", 4, 1), ("publish", 4, None),
    ]  # fmt: skip
