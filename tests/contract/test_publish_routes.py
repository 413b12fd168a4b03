"""Which bytes travel on which route when replicas connect, on fakes."""

import asyncio

import pytest

from llamarl.core.errors import ReplicaLost
from llamarl.planner.simulation.clock import run
from llamarl.publish.layout import RankLayout
from llamarl.publish.reshard import plan
from llamarl.publish.transports import routes
from tests.contract.publish_fakes import (
    NAMES,
    NUM_BYTES,
    World,
)


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
        assert writes[:2] == [("trainer", "write", 7, 0), (0, "commit", 7)]
        assert world.versions() == [7, 7, 7]
        assert (stats.lost, stats.num_running) == ({}, {0: 3, 1: 3, 2: 3})
        assert world.trainer.num_sent_bytes == NUM_BYTES
        assert world.generators[0].num_sent_bytes == 2 * NUM_BYTES
        assert stats.seconds >= 0
        assert sorted(world.events) == [(0, 7), (1, 7), (2, 7)]

    run(main())


def test_replicas_that_look_alike_on_different_hosts_share_one_plan(monkeypatch) -> None:
    plans = []

    def planned(source, target):
        plans.append(target)
        return plan(source, target)

    monkeypatch.setattr(routes, "plan", planned)

    async def main():
        world = await World("abab", transport="collective").connected()
        (first, second, *relays) = [world.generators[i].route for i in range(4)]
        assert [first.source, *(relay.source for relay in relays)] == [
            "trainer", "generator-0", "generator-1",
        ]  # fmt: skip
        assert first.copies == second.copies
        assert relays[0].copies == relays[1].copies
        assert len(plans) == 2

    run(main())


FAR = {"c": "there", "d": "there"}


def test_each_byte_leaves_the_trainer_once_for_another_site_whoever_is_lost() -> None:
    async def main():
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

    run(main())


def test_a_publish_does_not_wait_for_another_site_but_brings_the_version_there() -> None:
    async def main():
        world = await World("aac", far_sites=FAR, straggler_timeout_s=30.0).connected()
        world.delay_s = lambda who, step: 3.0 if who == 2 and step == "prepare" else 0.0
        for version in (0, 1):
            stats = await world.publish(version)
            assert stats.seconds < 1
            assert world.versions() == [version, version, version - 1]
            await asyncio.sleep(10)
        assert world.versions() == [1, 1, 1]
        await world.publisher.close()

    run(main())


@pytest.mark.parametrize("hosts", [("a",) * 3, ("a", "b", "a", "b", "b", "a")])
def test_each_byte_leaves_the_trainer_once_per_host(hosts) -> None:
    async def main():
        world = await World(hosts, transport="collective").connected()
        for version in range(5):
            await world.publish(version)
            assert world.trainer.num_sent_bytes == (version + 1) * NUM_BYTES * len({*hosts})
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

    run(main())


def test_shared_memory_never_leaves_a_host_and_nothing_is_connected_before_all_fit() -> None:
    async def main():
        world = World(("h", "other"), transport="shared_memory")
        with pytest.raises(ValueError, match=r"collective between.*trainer on h .*1 on other"):
            await world.publisher.connect()
        assert not {entry[1] for entry in world.journal} & {"connect_target", "connect_source"}

    run(main())


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ([RankLayout(rank=0, host="h", parameters={})], NAMES[0]),
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
