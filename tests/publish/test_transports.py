"""Every transport and every staging, in real processes, under the real publisher."""

import asyncio
import contextlib
import time

import pytest
import torch

from llamarl.core.errors import FingerprintMismatch, ReplicaLost, StaleVersion
from tests.publish.publishing import (
    STAGINGS,
    TRANSPORTS,
    Generator,
    GeneratorRanks,
    Remote,
    Trainer,
    TrainerRank,
    World,
    connected,
)
from tests.publish.publishing_damage import one_row_further
from tests.publish.publishing_layouts import KINDS, LARGEST_BYTES


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("rendezvous"))
    yield world
    world.close()


HARDEST = ("cast", "sharded")  # the kinds whose bytes change on the way, or lie on two ranks
EACH = [
    ("double_buffer", tuple(KINDS)),
    *((staging, HARDEST) for staging in STAGINGS if staging != "double_buffer"),
]
EACH += [pytest.param(each, tuple(KINDS), marks=pytest.mark.slow) for each, _ in EACH[1:]]


@pytest.mark.parametrize(("staging", "kinds"), EACH)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_version_arrives_bit_by_bit_while_the_active_weights_are_read(
    world, transport, staging, kinds
) -> None:
    for kind in kinds:
        for replica, host in enumerate(world.hosts):
            host.call("build", replica, kind, staging)
        trainer, generators = Trainer(world.trainers), [Generator(host) for host in world.hosts]
        async with connected(world, transport, staging, trainer, generators) as publisher:
            for _ in range(3):
                stats = await publisher.publish(world.train())
                assert stats.num_running == {0: 3, 1: 3}
        for host in world.hosts:
            num_reads, num_wrong = host.call("reads")
            assert num_wrong == 0
            assert num_reads >= 3


@pytest.mark.parametrize("num_publishes", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_healthy_publishes_raise_nothing(world, transport, num_publishes) -> None:
    world.hosts[0].call("build", 0, "sharded", "double_buffer")
    generators = [Generator(world.hosts[0])]
    trainer = Trainer(world.trainers)
    async with connected(world, transport, "double_buffer", trainer, generators) as publisher:
        for _ in range(num_publishes):
            world.version += 1
            for rank in world.trainers:
                rank.call("label", world.version)
            await publisher.publish(world.version)


async def refused(world, transport, kind, word, *, bend=list, is_damaged=False, after=None):
    """A damaged publish is found out and leaves the active weights; the next one works.

    `bend` changes the copies for both ends; with `is_damaged` the first trainer rank sends one bit
    that is wrong; `after` goes to the generator after the write.
    """
    host = world.hosts[0]
    host.call("build", 0, kind, "double_buffer")
    trainer, generators = Trainer(world.trainers, bend), [Generator(host, bend)]
    if after is not None:
        trainer.after = lambda: host.call(*after)
    async with connected(world, transport, "double_buffer", trainer, generators) as publisher:
        if is_damaged:
            world.trainers[0].call("damage")
        version = world.train()
        with pytest.raises(FingerprintMismatch) as caught:
            await publisher.publish(version)
    assert f"publish of version {world.version} to generator 0: " in str(caught.value)
    assert word in str(caught.value)
    trainer, generators = Trainer(world.trainers), [Generator(host)]
    async with connected(world, transport, "double_buffer", trainer, generators) as publisher:
        await publisher.publish(world.train())
    assert host.call("reads")[1] == 0


@pytest.mark.parametrize(
    ("kind", "name"), [("fused", "wide"), ("cast", "norm"), ("sharded", "scale"), ("sharded", "v")]
)
async def test_one_flipped_bit_anywhere_in_the_staging_memory_is_found_and_named(
    world, kind, name
) -> None:
    await refused(world, "shared_memory", kind, name, after=("flip_bit", name))


async def test_one_flipped_bit_in_a_message_is_found(world) -> None:
    await refused(world, "collective", "cast", "must arrive as written", is_damaged=True)


def damage_one(name, change):
    """Copies with the largest one of `name` replaced by `change` of it, or left out."""

    def bend(copies):
        victim = max(
            (copy for copy in copies if copy.name == name),
            key=lambda copy: (torch.Size(copy.shape).numel(), copy.source_rank, copy.target_rank),
        )
        rest = [copy for copy in copies if copy is not victim]
        return [*rest, *([change(victim)] if change else [])]

    return bend


def one_column_off(copy):
    return copy._replace(target_offset=copy.target_offset + copy.target_strides[-1])


WRONG_COPIES = [
    ("fused", "embed", one_row_further),
    ("cast", "q", one_column_off),
    ("sharded", "down", None),
    ("transposed", "q", one_row_further),
    ("transposed", "embed", None),
]


@pytest.mark.parametrize(
    ("transport", "kind", "name", "change"),
    [
        *(("shared_memory", *wrong) for wrong in WRONG_COPIES),
        *((transport, *WRONG_COPIES[2]) for transport in TRANSPORTS[1:]),
        *(
            pytest.param(transport, *wrong, marks=pytest.mark.slow)
            for transport in TRANSPORTS[1:]
            for wrong in WRONG_COPIES
            if wrong != WRONG_COPIES[2]
        ),
    ],
)
async def test_a_misplaced_or_skipped_slice_is_found_and_named(
    world, transport, kind, name, change
) -> None:
    await refused(world, transport, kind, name, bend=damage_one(name, change))


async def test_reading_from_another_place_than_the_layout_says_is_refused(world) -> None:
    def shift(copy):
        return copy._replace(source_offset=copy.source_offset - 1)

    world.hosts[0].call("build", 0, "fused", "double_buffer")
    trainer = Trainer(world.trainers, damage_one("norm", shift))
    generators = [Generator(world.hosts[0])]
    with pytest.raises(ValueError, match="copy of norm must read from where the layout has it"):
        async with connected(world, "shared_memory", "double_buffer", trainer, generators):
            pass


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_version_that_goes_away_is_aborted_and_the_next_one_comes_on_the_same_route(
    world, transport
) -> None:
    host = world.hosts[0]
    host.call("build", 0, "fused", "double_buffer")
    generator, trainer = Generator(host), Trainer(world.trainers)
    async with connected(world, transport, "double_buffer", trainer, [generator]):
        version = world.train()
        world.trainers[1].call("invalidate", version)  # rank 0 still has it and sends all it has
        handles = await generator.prepare(version)
        started_s = time.monotonic()
        writes = (rank.ask("write", version, handles) for rank in world.trainers)
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        with pytest.raises(StaleVersion, match=f"version {version} is not there"):
            raise outcomes[1]
        with contextlib.suppress(RuntimeError):  # of a transport whose target notices it, too
            await generator.verify(version)
        await generator.abort(version)
        assert time.monotonic() - started_s < 5
        version = world.train()
        handles = await generator.prepare(version)
        await trainer.write(version, handles)
        await generator.verify(version)
        await generator.commit(version)
        assert host.call("reads")[1] == 0


@pytest.mark.parametrize(
    "call",
    ["write", "commit", *(pytest.param(c, marks=pytest.mark.long) for c in ("prepare", "verify"))],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_replica_killed_between_any_two_calls_is_lost_and_the_others_go_on(
    world, transport, call
) -> None:
    survivor = world.hosts[0]
    with contextlib.closing(Remote(GeneratorRanks)) as victim:
        victim.call("build", 0, "sharded", "double_buffer")
        survivor.call("build", 1, "fused", "double_buffer")
        generators = [Generator(victim), Generator(survivor)]
        trainer = Trainer(world.trainers)
        async with connected(world, transport, "double_buffer", trainer, generators) as publisher:
            await publisher.publish(world.train())

            def kill(name, *args):
                if name == call:
                    victim.close()

            generators[0].before = kill
            trainer.before = lambda handles: kill("write") if handles[0].replica == 0 else None
            started_s = time.monotonic()
            stats = await publisher.publish(world.train())
            assert time.monotonic() - started_s < 10
            assert isinstance(stats.lost[0], ReplicaLost)
            assert stats.num_running == {1: 3}
            await publisher.publish(world.train())
            assert survivor.call("reads")[1] == 0


async def test_the_siblings_of_a_lost_head_get_a_new_source_only_once_it_cannot_write_any_more(
    world,
) -> None:
    for replica, host in enumerate(world.hosts):
        host.call("build", replica, "fused", "double_buffer")
    generators = [Generator(host) for host in world.hosts]
    lost, ended, calls = asyncio.Event(), asyncio.get_running_loop().create_future(), []

    def end(replica, why):
        lost.set()
        return ended

    def fail(name):
        if name == "write":
            raise RuntimeError("it went wrong on one rank, the others go on")

    trainer = Trainer(world.trainers)
    publisher = world.publisher("shared_memory", "double_buffer", trainer, generators, on_lost=end)
    try:
        await publisher.connect()
        generators[0].before = fail
        generators[1].before = calls.append
        publishing = asyncio.create_task(publisher.publish(world.train()))
        await lost.wait()
        await asyncio.sleep(0.2)
        assert calls == ["prepare", "abort"]
        ended.set_result(None)
        stats = await publishing
        assert stats.num_running == {0: 3, 1: 3}
        assert list(stats.lost) == [0]
        assert calls[2:] == ["connect_source", "prepare", "verify", "commit"]
    finally:
        await publisher.close()
        for replica in (0, 1):
            await trainer.connect_target(replica, None)


@pytest.mark.parametrize(
    "call",
    ["write", "commit", *(pytest.param(c, marks=pytest.mark.long) for c in ("prepare", "verify"))],
)
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
async def test_a_trainer_rank_killed_between_any_two_calls_ends_the_publish_and_mixes_no_versions(
    world, transport, call
) -> None:
    """Rank 1 is killed just before `call` on the first replica; the second gets it from there."""
    for replica, host in enumerate(world.hosts):
        host.call("build", replica, ("sharded", "fused")[replica], "double_buffer")
    generators = [Generator(host) for host in world.hosts]
    with contextlib.closing(Remote(TrainerRank, 1)) as victim:
        trainer = Trainer([world.trainers[0], victim])
        publisher = world.publisher(transport, "double_buffer", trainer, generators)

        def train():
            version = world.train()
            victim.call("train", version)
            return version

        def kill(name, *args):
            if name == call:
                victim.close()

        await publisher.connect()
        await publisher.publish(train())
        generators[0].before = kill
        trainer.before = lambda handles: kill("write")
        started_s = time.monotonic()
        try:
            version = train()
            if call in ("verify", "commit"):  # all that the trainer had to do is done
                stats = await publisher.publish(version)
                assert stats.num_running == {0: 3, 1: 3}
                version = world.train()
            with pytest.raises((EOFError, ConnectionError)):
                await publisher.publish(version)
            with pytest.raises((EOFError, ConnectionError)):
                await publisher.watch()
        finally:
            await publisher.close()
            world.trainers[0].call("connect", 0, None)
        assert time.monotonic() - started_s < 10
        assert [host.call("reads")[1] for host in world.hosts] == [0, 0]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_publish_allocates_little_and_gathers_nothing(world, transport) -> None:
    host = world.hosts[0]
    host.call("build", 0, "cast", "double_buffer")
    trainer, generator = Trainer(world.trainers), Generator(host)
    async with connected(world, transport, "double_buffer", trainer, [generator]):
        version = world.train()
        handles = host.call("prepare", version)
        watched = await asyncio.gather(
            *(rank.ask("watch_write", version, handles) for rank in world.trainers)
        )
        watched.append(host.call("watch_fingerprint", version))
        host.call("commit", version)
        for num_bytes, names in watched:
            assert 0 < num_bytes < LARGEST_BYTES / 4
            assert not [name for name in names if "c10d" in name or "gather" in name]
