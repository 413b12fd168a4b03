"""The two-phase protocol on fakes: order of calls, and what each failing step leaves behind."""

import asyncio
import gc
import json

import pytest

from llamarl.metrics.span import Spans
from llamarl.weights import publish
from llamarl.weights.layout import Box, Offer, ParameterLayout, RankLayout
from llamarl.weights.publish import FingerprintMismatch, Publisher, ReplicaLost, compare

NAMES = ("layers.0.weight", "layers.1.weight")


def layout(rank):
    box = Box(start=(0,), stop=(4,), buffer="arena", offset=0, strides=(1,))
    parameter = ParameterLayout(shape=(4,), dtype="float32", boxes=(box,))
    return RankLayout(rank=rank, host="h", parameters=dict.fromkeys(NAMES, parameter))


class Journal(list):
    """Everything that was called, in order, and which step shall fail how."""

    def __init__(self):
        self.failures = {}

    async def note(self, *entry):
        self.append(entry)
        await asyncio.sleep(0)
        failure = self.failures.get(entry[:2], self.failures.get(entry[1]))
        if failure == "hang":
            await asyncio.Event().wait()
        elif failure is not None:
            raise failure


class FakeSender:
    """Two trainer ranks whose weights' fingerprint is made of the version."""

    def __init__(self, journal):
        self.journal = journal

    async def source_layout(self):
        await self.journal.note("trainer", "source_layout")
        return [layout(0), layout(1)]

    async def connect(self, replica, copies):
        await self.journal.note("trainer", "connect", replica, len(copies))
        return [None, None]

    async def write(self, version, offers):
        await self.journal.note("trainer", "write", version, offers[0].replica)
        halves = dict.fromkeys(NAMES, version * 10)
        return [halves, halves]


class FakeReceiver:
    """A replica of one rank. `version` is what it decodes with."""

    def __init__(self, journal, replica):
        self.journal, self.replica = journal, replica
        self.version, self.offered = -1, None
        self.wrong = {}

    async def target_layout(self):
        return [layout(0)]

    async def offer(self, version):
        await self.journal.note(self.replica, "offer", version)
        assert self.offered is None
        self.offered = version
        offer = Offer(
            version=version, replica=self.replica, rank=0, host="h", segment="s", num_bytes=32
        )
        return [offer]

    async def fingerprint(self, version):
        await self.journal.note(self.replica, "fingerprint", version)
        assert self.offered == version
        return [dict.fromkeys(NAMES, version * 20) | self.wrong]

    async def flip(self, version):
        await self.journal.note(self.replica, "flip", version)
        assert self.offered == version
        self.version, self.offered = version, None
        return [3]

    async def discard(self, version):
        await self.journal.note(self.replica, "discard", version)
        assert self.offered == version
        self.offered = None
        return [None]


class World:
    """A publisher between fakes."""

    def __init__(self, num_replicas=2, timeout_s=5.0, spans=None):
        self.journal = Journal()
        self.receivers = {i: FakeReceiver(self.journal, i) for i in range(num_replicas)}
        self.heard = []
        self.publisher = Publisher(
            FakeSender(self.journal),
            dict(self.receivers),
            spans or Spans("controller", None),
            timeout_s,
            on_flip=lambda replica, version: self.heard.append((replica, version)),
            on_lost=lambda replica, why: self.heard.append((replica, str(why))),
        )

    async def connect(self):
        await self.publisher.connect()
        self.journal.clear()

    def of(self, who):
        return [entry[1] for entry in self.journal if entry[0] == who]


def test_each_replica_is_offered_written_compared_and_flipped_in_this_order() -> None:
    async def run():
        world = World()
        await world.publisher.connect()
        assert world.journal == [
            ("trainer", "source_layout"),
            ("trainer", "connect", 0, 2),
            ("trainer", "connect", 1, 2),
        ]
        world.journal.clear()
        stats = await world.publisher.publish(7)
        for replica in (0, 1):
            mine = [e for e in world.journal if e[0] == replica or e[1:] == ("write", 7, replica)]
            assert [e[1] for e in mine] == ["offer", "write", "fingerprint", "flip"]
        assert {r.version for r in world.receivers.values()} == {7}
        assert (stats.version, stats.num_bytes, stats.lost) == (7, 2 * 2 * 4 * 4, {})
        assert stats.num_running == {0: 3, 1: 3}
        assert stats.seconds >= 0
        assert sorted(world.heard) == [(0, 7), (1, 7)]

    asyncio.run(run())


def test_replicas_are_updated_at_the_same_time() -> None:
    async def run():
        world = World()
        await world.connect()
        await world.publisher.publish(0)
        steps = [entry[1] for entry in world.journal]
        assert steps.index("flip") > max(i for i, step in enumerate(steps) if step == "write")

    asyncio.run(run())


@pytest.mark.parametrize("failure", [ValueError("broken"), "hang"])
@pytest.mark.parametrize("step", ["offer", "fingerprint", "flip"])
def test_a_replica_that_fails_at_any_step_is_lost_and_the_others_are_published(
    step, failure
) -> None:
    async def run():
        world = World(num_replicas=3, timeout_s=0.1)
        await world.connect()
        await world.publisher.publish(0)
        world.heard.clear()
        world.journal.failures[1, step] = failure
        stats = await asyncio.wait_for(world.publisher.publish(1), timeout=5)
        assert [r.version for r in world.receivers.values()] == [1, 0, 1]
        assert list(stats.lost) == [1]
        assert stats.num_running == {0: 3, 2: 3}
        assert stats.num_bytes == 2 * 32
        assert f"generator 1 {'failed at' if failure != 'hang' else 'must answer'} {step}" in str(
            stats.lost[1]
        )
        assert isinstance(stats.lost[1], ReplicaLost)
        assert failure == "hang" or stats.lost[1].__cause__ is failure
        assert sorted(world.heard) == [(0, 1), (1, str(stats.lost[1])), (2, 1)]
        assert world.publisher.replicas == [0, 2]
        assert world.journal[-1] == ("trainer", "connect", 1, 0), "its memory is unmapped"
        world.journal.clear()
        await world.publisher.publish(2)
        assert world.of(1) == []
        assert [world.receivers[i].version for i in (0, 2)] == [2, 2]

    asyncio.run(run())


def test_a_replica_that_joins_or_comes_back_takes_part_from_the_next_publish() -> None:
    async def run():
        world = World(num_replicas=2)
        await world.connect()
        world.journal.failures[1, "offer"] = ConnectionError("gone")
        await world.publisher.publish(0)
        world.journal.failures.clear()
        for replica in (1, 5):
            world.receivers[replica] = FakeReceiver(world.journal, replica)
            await world.publisher.connect_replica(replica, world.receivers[replica])
        assert world.receivers[5].version == -1
        await world.publisher.publish(1)
        assert [r.version for r in world.receivers.values()] == [1, 1, 1]
        await world.publisher.drop(0)
        await world.publisher.publish(2)
        assert [r.version for r in world.receivers.values()] == [1, 2, 2]

    asyncio.run(run())


def test_losing_the_last_replica_stops_the_run_with_its_error() -> None:
    async def run():
        world = World(num_replicas=1)
        await world.connect()
        world.journal.failures[0, "offer"] = ConnectionError("gone")
        with pytest.raises(RuntimeError, match="no generator took version 0") as caught:
            await world.publisher.publish(0)
        assert isinstance(caught.value.__cause__.__cause__, ConnectionError)

    asyncio.run(run())


def test_a_wrong_fingerprint_stops_the_run_names_everything_and_never_flips() -> None:
    async def run():
        world = World()
        await world.connect()
        await world.publisher.publish(0)
        world.receivers[1].wrong = {NAMES[1]: 12345}
        with pytest.raises(FingerprintMismatch) as caught:
            await world.publisher.publish(1)
        for word in (NAMES[1], "generator 1", "version 1", f"{12345:016x}", f"{20:016x}"):
            assert word in str(caught.value)
        assert NAMES[0] not in str(caught.value)
        assert world.receivers[1].version == 0
        assert world.of(1)[-1] == "discard"
        assert world.receivers[1].offered is None
        assert world.publisher.version == 0

    asyncio.run(run())


def test_all_wrong_parameters_are_named_up_to_a_limit() -> None:
    written = {f"p{i}": i for i in range(10)}
    with pytest.raises(FingerprintMismatch, match=r": p0, p1, .*p7 and 2 more must"):
        compare(written, dict.fromkeys(written, 77), 0, 1)
    with pytest.raises(FingerprintMismatch, match=r": p3, unknown must .*0003, got none"):
        compare({"p3": 3, "p4": 4}, {"p4": 4, "unknown": 5}, 0, 1)


def test_an_error_of_the_trainer_is_raised_at_once_as_it_is_and_nothing_flips() -> None:
    async def run():
        world = World(timeout_s=60.0)
        await world.connect()
        await world.publisher.publish(0)
        world.journal.clear()
        error = MemoryError("a trainer's own")
        world.journal.failures["trainer", "write"] = error
        world.journal.failures[1, "offer"] = "hang"  # must not hold the error back
        with pytest.raises(MemoryError) as caught:
            await asyncio.wait_for(world.publisher.publish(1), timeout=5)
        assert caught.value is error
        assert [r.version for r in world.receivers.values()] == [0, 0]
        assert world.of(0) == ["offer", "discard"]

    asyncio.run(run())


def test_a_silent_trainer_ends_the_run_in_time() -> None:
    async def run():
        world = World(timeout_s=0.1)
        await world.connect()
        world.journal.failures["trainer", "write"] = "hang"
        with pytest.raises(TimeoutError, match=r"trainer write must end within .*0\.1 s"):
            await world.publisher.publish(0)
        assert [r.version for r in world.receivers.values()] == [-1, -1]
        assert {r.offered for r in world.receivers.values()} == {None}

    asyncio.run(run())


@pytest.mark.parametrize("failure", ["hang", OSError("too")])
def test_a_discard_that_fails_does_not_hide_or_delay_the_error(
    failure, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(publish, "DISCARD_S", 0.05)

    async def run():
        world = World(num_replicas=1, timeout_s=60.0)
        await world.connect()
        world.journal.failures["trainer", "write"] = MemoryError("a trainer's own")
        world.journal.failures[0, "discard"] = failure
        with pytest.raises(MemoryError):
            await asyncio.wait_for(world.publisher.publish(0), timeout=5)
        assert world.of(0) == ["offer", "discard"]

    asyncio.run(run())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_loss_is_heard_of_while_other_replicas_are_busy() -> None:
    async def run():
        world = World()
        await world.connect()
        world.journal.failures[1, "offer"] = ConnectionError("gone")
        world.journal.failures[0, "flip"] = "hang"
        task = asyncio.create_task(world.publisher.publish(0))
        while not world.heard:
            await asyncio.sleep(0.01)
        assert world.heard[0][0] == 1
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_versions_go_up_and_publishes_go_one_by_one() -> None:
    async def run():
        world = World()
        with pytest.raises(RuntimeError, match="connected generator"):
            await world.publisher.publish(0)
        await world.connect()
        await world.publisher.publish(3)
        for version in (3, 2):
            with pytest.raises(RuntimeError, match="newer than 3"):
                await world.publisher.publish(version)
        running = asyncio.create_task(world.publisher.publish(4))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="must wait"):
            await world.publisher.publish(5)
        await running
        await world.publisher.publish(5)
        assert world.receivers[0].version == 5

    asyncio.run(run())


def test_a_layout_that_does_not_fit_is_refused_when_connecting() -> None:
    async def run():
        world = World()

        async def other_layout():
            return [RankLayout(rank=0, host="h", parameters={})]

        world.receivers[1].target_layout = other_layout
        with pytest.raises(ValueError, match=NAMES[0]):
            await world.publisher.connect()

    asyncio.run(run())


def test_a_publish_is_one_span(tmp_path) -> None:
    spans = Spans("controller", tmp_path)

    async def run():
        world = World(spans=spans)
        await world.connect()
        await world.publisher.publish(4)

    asyncio.run(run())
    spans.close()
    lines = map(json.loads, (tmp_path / "controller.jsonl").read_text().splitlines())
    (span,) = [line for line in lines if line.get("name") == "publish"]
    assert (span["cat"], span["version"]) == ("publish", 4)
