"""Publishing on fakes: who sends what when, and which bytes travel on which route."""

import asyncio
import cProfile
import pstats
import random
from itertools import pairwise

import pytest

from llamarl.core.errors import ReplicaLost
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.publish import publisher
from llamarl.publish.layout import RankLayout
from llamarl.publish.replica import Stagger
from llamarl.publish.reshard import plan
from tests.json_lines import read_lines
from tests.publish.publish_fakes import (
    NAMES,
    NUM_BYTES,
    FakeGenerator,
    World,
)

RUN_TESTS = run  # on a virtual clock


@pytest.mark.parametrize("commit_s", [0.3, 3.0])
async def test_replicas_commit_one_by_one_but_a_slow_one_holds_the_others_only_for_a_moment(
    commit_s,
) -> None:
    world = await World("abc", straggler_timeout_s=60.0).connected()
    starts = {}

    async def note(who, step, *entry):
        if step == "commit":
            starts[who] = asyncio.get_running_loop().time()
            await asyncio.sleep(commit_s)

    world.note = note
    await world.publish(0)
    assert world.versions() == [0, 0, 0]
    gaps = [b - a for a, b in pairwise(sorted(starts.values()))]
    assert gaps == pytest.approx([min(commit_s, publisher.COMMIT_S)] * 2)


async def test_a_stuck_turn_ends_after_its_limit_and_is_not_given_back_twice() -> None:
    stagger, order = Stagger(0.5), []

    async def hold(name, seconds):
        async with stagger.alone():
            order.append((name, asyncio.get_running_loop().time()))
            await asyncio.sleep(seconds)

    await asyncio.gather(*(hold(i, seconds) for i, seconds in enumerate((2.0, 0.2, 0.2, 0.2))))
    assert order == [(i, pytest.approx(t)) for i, t in enumerate((0.0, 0.5, 0.7, 0.9))]


async def test_a_slow_replica_holds_no_other_and_catches_up_with_the_newest() -> None:
    world = await World(("h",) * 3, timeout_s=60.0).connected()
    clock = asyncio.get_running_loop().time
    world.delay_s = lambda who, step: 10.0 * ((who, step) == (1, "prepare"))
    for version in range(5):
        start_s = clock()
        stats = await world.publish(version)
        waited_s = 0.0 if version else 1.0  # once the timeout for stragglers, never the replica
        assert clock() - start_s == pytest.approx(waited_s, abs=0.01)
        assert stats.num_running == {0: 3, 2: 3}
    world.delay_s = lambda who, step: 0.0
    await asyncio.sleep(20)
    assert world.versions() == [4, 4, 4]
    assert [v for r, v in world.events if r == 1][-1] == 4
    assert len([v for r, v in world.events if r == 1]) <= 2, "it skipped what was overtaken"
    stats = await world.publish(5)
    assert stats.num_running == {0: 3, 1: 3, 2: 3}


async def test_a_replica_that_joins_or_comes_back_gets_the_newest_version() -> None:
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


async def test_a_version_that_its_source_has_no_more_is_aborted_and_the_next_one_taken() -> None:
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


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
async def test_a_publish_that_the_trainer_has_overtaken_ends_without_commits(hosts) -> None:
    world = await World(hosts).connected()
    world.trainer.version = 1
    stats = await world.publisher.publish(0)
    assert (stats.num_running, stats.lost) == ({}, {})
    await world.publish(1)
    assert world.versions() == [1] * len(hosts)


async def test_versions_go_up_and_publishes_go_one_by_one() -> None:
    world = World()
    with pytest.raises(RuntimeError, match="connected generator"):
        await world.publish(0)
    await world.connected()
    await world.publish(3)
    for version in (3, 2):
        with pytest.raises(RuntimeError, match="newer than 3"):
            await world.publish(version)
    replica = world.publisher._syncs[0]
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


def test_a_publish_is_one_span_and_each_replica_has_its_own(tmp_path) -> None:
    spans = Spans("controller", tmp_path)

    async def main():
        world = await World(spans=spans).connected()
        await world.publish(4)

    run(main())
    spans.close()
    lines = read_lines(tmp_path / "controller.jsonl")
    found = [line for line in lines if line.get("name") == "publish"]
    assert [(span["cat"], span["version"], span.get("replica")) for span in found] == [
        ("publish", 4, 0), ("publish", 4, 1), ("publish", 4, None),
    ]  # fmt: skip


def num_calls_of_a_publish(num_replicas, replicas_per_host):
    """Calls of Python functions, each replica's answers coming when they will."""
    rng = random.Random(0)

    async def main():
        hosts = [f"host {i // replicas_per_host}" for i in range(num_replicas)]
        world = World(hosts, straggler_timeout_s=1000.0)
        world.delay_s = lambda who, step: rng.uniform(0.001, 0.02)
        await world.connected()
        await world.publish(0)
        with cProfile.Profile() as profile:
            await world.publish(1)
        return pstats.Stats(profile).total_calls

    return run(main())


@pytest.mark.parametrize("replicas_per_host", [1, 8])
def test_a_publish_to_four_times_as_many_replicas_is_four_times_the_work(replicas_per_host) -> None:
    few = num_calls_of_a_publish(32, replicas_per_host)
    assert num_calls_of_a_publish(128, replicas_per_host) < 4.3 * few


async def test_one_replica_feeds_the_others_of_its_host_and_the_trainer_only_the_first() -> None:
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
    assert writes[:2] == [("trainer", "write", 7, 0), (0, "commit", 7)]
    assert world.versions() == [7, 7, 7]
    assert (stats.lost, stats.num_running) == ({}, {0: 3, 1: 3, 2: 3})
    assert world.trainer.num_sent_bytes == NUM_BYTES
    assert world.generators[0].num_sent_bytes == 2 * NUM_BYTES
    assert stats.seconds >= 0
    assert sorted(world.events) == [(0, 7), (1, 7), (2, 7)]


async def test_replicas_that_look_alike_on_different_hosts_share_one_plan(monkeypatch) -> None:
    plans = []

    def planned(source, target):
        plans.append(target)
        return plan(source, target)

    monkeypatch.setattr(publisher, "plan", planned)
    world = await World("abab", transport="collective").connected()
    (first, second, *relays) = [world.generators[i].route for i in range(4)]
    assert [first.source, *(relay.source for relay in relays)] == [
        "trainer", "generator-0", "generator-1",
    ]  # fmt: skip
    assert first.copies == second.copies
    assert relays[0].copies == relays[1].copies
    assert len(plans) == 2


FAR = {"c": "there", "d": "there"}


async def test_each_byte_leaves_the_trainer_once_for_another_site_whoever_is_lost() -> None:
    world = await World("acdcd", far_sites=FAR, timeout_s=60.0).connected()
    routes = [world.generators[i].route for i in range(5)]
    assert [route.source for route in routes] == [
        "trainer", "trainer", "generator-1", "generator-1", "generator-2",
    ]  # fmt: skip
    assert [route.transport for route in routes] == ["collective"] * 3 + ["shared_memory"] * 2
    assert [route.is_slow for route in routes] == [False, True, False, False, False]
    await world.publish(0)
    await asyncio.sleep(10)
    assert world.versions() == [0] * 5
    assert world.trainer.num_sent_bytes == 2 * NUM_BYTES, "to its own site, and to the other"
    world.failures[1, "prepare"] = ReplicaLost("it is gone")
    await world.publish(1)
    await asyncio.sleep(10)
    assert [world.generators[i].version for i in (0, 2, 3, 4)] == [1] * 4
    assert [world.generators[i].route.source for i in (2, 3, 4)] == [
        "trainer", "generator-2", "generator-2",
    ]  # fmt: skip
    await world.publisher.close()


async def test_a_publish_does_not_wait_for_another_site_but_brings_the_version_there() -> None:
    world = await World("aac", far_sites=FAR, straggler_timeout_s=30.0).connected()
    world.delay_s = lambda who, step: 3.0 if who == 2 and step == "prepare" else 0.0
    for version in (0, 1):
        stats = await world.publish(version)
        assert stats.seconds < 1
        assert world.versions() == [version, version, version - 1]
        await asyncio.sleep(10)
    assert world.versions() == [1, 1, 1]
    await world.publisher.close()


@pytest.mark.parametrize("hosts", [("a",) * 3, ("a", "b", "a", "b", "b", "a")])
async def test_each_byte_leaves_the_trainer_once_per_host(hosts) -> None:
    world = await World(hosts, transport="collective").connected()
    for version in range(5):
        await world.publish(version)
        assert world.trainer.num_sent_bytes == (version + 1) * NUM_BYTES * len({*hosts})
    sent = sum(generator.num_sent_bytes for generator in world.generators.values())
    assert sent == 5 * NUM_BYTES * (len(hosts) - len({*hosts}))
    assert world.versions() == [4] * len(hosts)


@pytest.mark.parametrize(
    ("transport", "device", "relay"),
    [
        ("collective", "cpu", "shared_memory"),
        ("collective", "cuda", "cuda_ipc"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
    ],
)
async def test_routes_say_what_carries_the_bytes_and_collective_ones_meet_at_a_new_path(
    transport, device, relay, tmp_path
) -> None:
    folder = tmp_path / "rendezvous"
    world = World(transport=transport, device=device, folder=folder)
    await world.publisher.connect()
    first, second = (generator.route for generator in world.generators.values())
    assert (first.transport, second.transport) == (transport, relay)
    assert second.rendezvous == ""
    if transport == "collective":
        await world.publisher.connect_replica(0, world.generators[0])
        await world.publisher.connect_replica(1, world.generators[1])
        again = world.generators[0].route
        assert again.source == "generator-1" or again.rendezvous != first.rendezvous
        paths = [first.rendezvous, world.generators[1].route.rendezvous]
        assert all(path.startswith(f"{folder}/") for path in paths if path)
        assert folder.is_dir()
        assert list(folder.iterdir()) == []


async def test_shared_memory_never_leaves_a_host_and_nothing_is_connected_before_all_fit() -> None:
    world = World(("h", "other"), transport="shared_memory")
    with pytest.raises(ValueError, match=r"collective between.*trainer on h .*1 on other"):
        await world.publisher.connect()
    assert not {entry[1] for entry in world.journal} & {"connect_target", "connect_source"}


async def test_a_layout_that_does_not_fit_is_refused_when_connecting() -> None:
    world = World()

    async def other_layout():
        return [RankLayout(rank=0, host="h", parameters={})]

    world.generators[1].target_layout = other_layout
    with pytest.raises(ValueError, match=NAMES[0]):
        await world.publisher.connect()


@pytest.mark.parametrize("step", ["source_layout", "connect_target", "connect_source"])
async def test_an_error_while_connecting_at_the_start_is_raised_as_it_is(step) -> None:
    for failure in (MemoryError("own"), "hang"):
        world = World()
        world.failures[step] = failure
        match = "own" if failure != "hang" else r"must .* within weights\.timeout_s=5 s"
        with pytest.raises((MemoryError, TimeoutError, ReplicaLost), match=match):
            await world.publisher.connect()


async def test_both_ends_of_a_route_are_connected_at_the_same_time() -> None:
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
