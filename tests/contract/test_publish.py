"""Publishing on fakes: who sends what when, and what a failure leaves behind."""

import asyncio
import cProfile
import pstats
import random
from itertools import pairwise

import pytest

from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.publish import publisher
from llamarl.publish.replica import Stagger
from tests.contract.publish_fakes import (
    FakeGenerator,
    World,
)
from tests.json_lines import read_lines


def test_a_version_is_prepared_written_verified_and_committed() -> None:
    async def main():
        world = await World().connected()
        await world.publish(0)
        assert world.steps(1) == ["prepare", "verify", "commit"]
        first = [entry[1] for entry in world.journal if entry[0] in (0, "trainer")]
        steps = ["prepare", "write", "verify", "commit"]
        assert [step for step in first if step != "pass_on"] == steps

    run(main())


@pytest.mark.parametrize("commit_s", [0.3, 3.0])
def test_replicas_commit_one_by_one_but_a_slow_one_holds_the_others_only_for_a_moment(
    commit_s,
) -> None:
    async def main():
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
        assert (stats.num_running, stats.lost) == ({}, {})
        await world.publish(1)
        assert world.versions() == [1] * len(hosts)

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
