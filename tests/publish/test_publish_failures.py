"""Publishing when a process fails, hangs, dies or sends wrong bits, on fakes."""

import asyncio
import gc
import random
from itertools import chain

import pytest

from llamarl.core.errors import FingerprintMismatch, ReplicaLost, StaleVersion, TargetLost
from llamarl.planner.simulation.clock import run
from llamarl.publish import replica as replica_sync
from llamarl.publish.comparison import compare
from tests.publish.publish_fakes import (
    NAMES,
    NUM_BYTES,
    FakeGenerator,
    World,
)

RUN_TESTS = run  # on a virtual clock


@pytest.mark.parametrize("failure", [ValueError("broken"), "hang"])
@pytest.mark.parametrize("step", ["prepare", "verify", "commit"])
@pytest.mark.parametrize("replica", [0, 1])
async def test_a_replica_that_fails_at_any_step_is_lost_and_the_others_are_published(
    replica, step, failure
) -> None:
    world = await World(("h",) * 3, straggler_timeout_s=60.0).connected()
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
    assert world.connected_replicas() == others
    source = world.generators[0] if replica else world.trainer
    await asyncio.sleep(0.1)
    assert source.routes[replica] is None, "its memory is unmapped"
    world.journal.clear()
    await world.publish(2)
    assert world.steps(replica) == []
    assert [world.generators[i].version for i in others] == [2, 2]


def test_a_replica_killed_between_any_two_calls_has_the_old_version_or_is_lost() -> None:
    async def main(replica, num_calls):
        world = await World(("h",) * 3).connected()
        await world.publish(0)
        victim = world.generators[replica]
        victim.calls_left = num_calls
        for version in (1, 2):
            await world.publish(version)
        for each in world.connected_replicas():
            assert world.generators[each].version == 2
        assert {0, 1, 2} - {*world.connected_replicas()} <= {replica}
        assert victim.version in (0, 1, 2), "what it decodes with is whole"
        return replica in world.connected_replicas()

    for replica in (0, 1):
        ends = [run(main(replica, num_calls)) for num_calls in range(40)]
        assert ends[0] is False
        assert ends[-1] is True
        assert ends == sorted(ends), "each call of two publishes was the last one once"


async def test_a_write_that_fails_is_aborted_and_another_source_brings_the_version() -> None:
    world = await World().connected()
    await world.publish(0)
    relay = world.generators[0]

    async def write(version, handles):
        raise StaleVersion("gone on")

    relay.write = write
    await world.publish(1)
    assert relay.version == 1
    assert world.connected_replicas() == [0, 1]
    assert world.generators[1].version == 0
    assert "abort" in world.steps(1)
    await world.publisher.drop(0)
    await asyncio.sleep(1)
    assert world.generators[1].version == 1, "the trainer still has it"


async def test_when_the_head_of_a_host_is_lost_the_next_replica_takes_its_place() -> None:
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
        assert world.connected_replicas() == [0, 2, 3]
        assert [world.generators[i].version for i in (0, 2, 3)] == [1, 1, 1]
        assert world.generators[2].route.source == "trainer"
        assert world.generators[3].route.source == "generator-2"
        before = world.trainer.num_sent_bytes
        await world.publish(2)
        assert world.trainer.num_sent_bytes - before == 2 * NUM_BYTES
        await world.publisher.drop(2)
        await world.publish(3)
        assert [world.generators[i].version for i in (0, 1, 2, 3)] == [3, 1, 2, 3]
        assert world.generators[3].route.source == "trainer"


async def test_a_target_that_the_source_cannot_reach_is_lost_alone() -> None:
    world = await World(("h",) * 3).connected()
    write = world.trainer.write

    async def once(version, handles):
        if handles[0].replica == 0:
            raise TargetLost("connection reset")
        return await write(version, handles)

    world.trainer.write = once
    stats = await world.publish(0)
    assert [*stats.lost] == [0]
    assert "connection reset" in str(stats.lost[0])
    assert world.versions() == [-1, 0, 0]


async def test_losing_the_last_replica_stops_the_run_with_its_error() -> None:
    world = await World(("h",)).connected()
    world.failures[0, "prepare"] = ConnectionError("gone")
    with pytest.raises(RuntimeError, match="no generator took version 0") as caught:
        await world.publish(0)
    assert isinstance(caught.value.__cause__.__cause__, ConnectionError)
    with pytest.raises(RuntimeError, match="connected generator") as caught:
        await world.publish(1)
    assert isinstance(caught.value.__cause__, ReplicaLost)


async def test_an_error_of_the_trainer_is_raised_at_once_as_it_is_and_nothing_commits() -> None:
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


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
async def test_a_silent_trainer_ends_the_run_in_time(transport, tmp_path) -> None:
    world = await World(transport=transport, folder=tmp_path).connected()
    world.failures["trainer", "write"] = world.failures["trainer", "source_layout"] = "hang"
    with pytest.raises(TimeoutError, match=r"trainer write must end within .*5 s"):
        await world.publish(0)
    assert world.versions() == [-1, -1]
    assert {generator.prepared for generator in world.generators.values()} == {None}


async def test_a_replica_at_which_the_write_of_a_living_trainer_hangs_is_lost() -> None:
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


@pytest.mark.parametrize("error", [MemoryError("own"), None])
async def test_an_error_of_a_replica_in_the_background_surfaces(error) -> None:
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


async def test_a_loss_is_reported_while_other_replicas_are_busy() -> None:
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


async def test_a_replica_that_is_dropped_while_it_is_written_to_is_forgotten_after_its_abort() -> (
    None
):
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


async def test_closing_ends_the_tasks_and_aborts_what_was_prepared() -> None:
    world = await World("ab").connected()
    world.failures["trainer", "write"] = "hang"
    task = asyncio.create_task(world.publish(0))
    await asyncio.sleep(1)
    await world.publisher.close()
    assert [world.steps(replica) for replica in (0, 1)] == [["prepare", "abort"]] * 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("num_publishes", [300, pytest.param(1000, marks=pytest.mark.slow)])
async def test_healthy_publishes_with_random_delays_raise_nothing(num_publishes) -> None:
    rng = random.Random(0)
    world = await World("aabbb", straggler_timeout_s=0.05).connected()
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


def test_whichever_replica_dies_the_others_get_to_the_newest_version() -> None:
    async def main(seed):
        rng = random.Random(seed)
        world = await World("aabbb", straggler_timeout_s=0.05, timeout_s=2.0).connected()
        world.delay_s = lambda who, step: rng.choice((0.0, 0.001, 0.02, rng.random() * 0.3))
        victims = {2, 3} if seed % 2 else {0, 3}
        for victim in victims:
            world.generators[victim].calls_left = rng.randrange(80)
        watching = asyncio.create_task(world.publisher.watch())
        for version in range(12):
            await world.publish(version)
            world.trainer.version += rng.random() < 0.5  # the trainer may step at once
            if rng.random() < 0.2:
                who = rng.choice(world.connected_replicas())
                world.generators[who] = FakeGenerator(world, who, world.generators[who].host)
                await world.publisher.connect_replica(who, world.generators[who])
                world.generators[who].calls_left = None
            await asyncio.sleep(rng.random() * 0.2)
        world.trainer.version = 12
        world.delay_s = lambda who, step: 0.01
        await world.publisher.publish(12)
        await asyncio.sleep(10)
        assert not watching.done()
        whole = world.connected_replicas()
        assert [world.generators[i].version for i in whole] == [12] * len(whole)
        assert set(range(5)) - set(whole) <= victims
        sources = {world.generators[i].host: world.generators[i].route.source for i in whole}
        fed = [world.generators[i] for i in whole if world.generators[i].route.source == "trainer"]
        assert sorted(generator.host for generator in fed) == sorted(sources)

    for seed in range(30):
        run(main(seed))


async def test_a_wrong_fingerprint_stops_the_run_names_everything_and_never_commits() -> None:
    world = await World("ab").connected()
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


async def test_what_a_relay_passes_on_is_compared_with_what_the_trainer_wrote() -> None:
    world = await World(("h",) * 2).connected()
    await world.publish(0)
    commit = world.generators[0].commit

    async def rotten(version):
        answer = await commit(version)
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


def test_all_wrong_parameters_are_named_up_to_a_limit() -> None:
    written = {f"p{i}": i for i in range(10)}
    with pytest.raises(FingerprintMismatch, match=r": p0, p1, .*p7 and 2 more must"):
        compare(written, dict.fromkeys(written, 77), 0, 1)
    with pytest.raises(FingerprintMismatch, match=r": p3, unknown must .*0003, got none"):
        compare({"p3": 3, "p4": 4}, {"p4": 4, "unknown": 5}, 0, 1)
