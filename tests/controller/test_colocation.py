"""Turns on a shared device: who has what there when, on a virtual clock."""

import asyncio
import gc
import random

import pytest

from llamarl.controller.colocation import Colocated, Colocation, Phase
from llamarl.core.errors import ExecutorLost, NoGenerator
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from tests.json_lines import read_lines

RUN_TESTS = run  # on a virtual clock

TRAINER, GENERATOR = {"weights", "state"}, {"weights", "kv"}


class Device:
    """What lies on it, per tenant; `events` is all that happened, in order."""

    def __init__(self):
        self.tags = {}
        self.events = []

    def check(self):
        trainer = self.tags["trainer"]
        for name, tags in self.tags.items():
            if name != "trainer" and trainer and tags:
                assert trainer | tags <= {"weights"}, self.tags


class FakeTenant:
    """Starts complete. Moving a kind takes `move_s`; a lost one raises from then on."""

    def __init__(self, name, tags, device, move_s, lost_at=None):
        self.name, self.all_kinds, self.device, self.move_s = name, tags, device, move_s
        self.lost_at = lost_at
        self.num_calls = 0
        device.tags[name] = set(tags)

    async def offload(self, tags):
        self._call("offload", tags)
        for tag in tags:
            if tag in self.device.tags[self.name]:
                await asyncio.sleep(self.move_s())
                self.device.tags[self.name].discard(tag)

    async def prefetch(self, tags):
        self._call("prefetch", tags)

    async def onload(self, tags):
        self._call("onload", tags)
        for tag in tags:
            if tag not in self.device.tags[self.name]:
                self.device.tags[self.name].add(tag)
                self.device.check()
                await asyncio.sleep(self.move_s())

    @property
    def is_complete(self):
        return self.device.tags[self.name] == self.all_kinds

    def _call(self, method, tags):
        self.num_calls += 1
        if self.lost_at is not None and self.num_calls >= self.lost_at:
            self.device.tags[self.name] = set()
            self.all_kinds = None  # never complete again
            raise ExecutorLost(self.name, 0, "killed")
        assert set(tags) <= self.all_kinds
        self.device.events.append(f"{self.name} {method} {' '.join(tags)}")


class Loop:
    """The controller's use of turns: a train stage, and publishes beside it."""

    def __init__(self, max_staleness, seed=0, num_generators=2, num_steps=6, lost_at=None):
        self.random = random.Random(seed)
        self.device = Device()
        self.trainer = FakeTenant("trainer", TRAINER, self.device, self.some_s)
        self.generators = {
            i: FakeTenant(f"generator-{i}", GENERATOR, self.device, self.some_s, lost)
            for i, lost in enumerate(lost_at or [None] * num_generators)
        }
        self.colocation = Colocated(self.trainer, self.generators, Spans("controller", None))
        self.max_staleness, self.num_steps = max_staleness, num_steps
        self.num_ready = 0
        self.version = 0

    def some_s(self):
        return self.random.choice([0, 0, 0.1, 1, 5])

    async def run(self):
        await self.colocation.begin()
        await self.publish(0)
        writing = asyncio.create_task(self.generate())
        publishing = asyncio.create_task(asyncio.sleep(0))
        for step in range(self.num_steps):
            async with self.colocation.phase(Phase.TRAIN, lambda step=step: self.ready(step)):
                self.device.events.append(f"train {step}")
                self.device.check()
                assert self.trainer.is_complete
                await asyncio.sleep(self.some_s())
            await publishing
            publishing = asyncio.create_task(self.publish(step + 1))
        await publishing
        writing.cancel()
        async with self.colocation.phase(Phase.TRAIN):
            assert self.trainer.is_complete

    async def publish(self, version):
        async with self.colocation.phase(Phase.SYNC):
            self.device.events.append(f"publish {version}")
            self.device.check()
            assert self.device.tags["trainer"] == {"weights"}
            alive = [g for g in self.generators.values() if g.device.tags[g.name]]
            assert alive
            assert all(g.device.tags[g.name] == {"weights"} for g in alive)
            await asyncio.sleep(self.some_s())
        self.version = version

    async def generate(self):
        """One batch at a time, while some generator is complete, as far ahead as is allowed."""
        while True:
            await asyncio.sleep(0.05)
            is_working = any(generator.is_complete for generator in self.generators.values())
            if is_working and self.num_ready < self.version + self.max_staleness + 1:
                self.num_ready += 1

    async def ready(self, step):
        while self.num_ready <= step:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "max_staleness",
    [1, pytest.param(0, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)],
)
def test_only_one_side_is_complete_on_the_device_whatever_takes_how_long(max_staleness):
    for seed in range(40):
        loop = Loop(max_staleness, seed)
        run(loop.run())
        done = [event for event in loop.device.events if event.startswith(("train ", "publish"))]
        expected = ["publish 0"]
        for step in range(loop.num_steps):
            expected += [f"train {step}", f"publish {step + 1}"]
        assert done == expected


def test_a_step_moves_each_kind_once_and_in_this_order():
    loop = Loop(0, num_generators=1, num_steps=2)
    run(loop.run())
    events = loop.device.events
    first, second = events.index("publish 1"), events.index("publish 2")
    assert events[first + 1 : second + 3] == [
        "trainer offload weights",
        "generator-0 onload kv",
        "trainer prefetch weights state",  # while the generator writes the batch
        "generator-0 offload kv weights",
        "trainer onload weights state",
        "generator-0 prefetch weights kv",  # while the trainer trains
        "train 1",
        "trainer offload state",
        "generator-0 offload kv",  # has left already
        "trainer onload weights",  # is there already
        "generator-0 onload weights",
        "publish 2",
        "trainer offload weights",
        "generator-0 onload kv",
    ]


def test_a_train_turn_waits_for_the_sync_that_is_asked_for_later():
    loop = Loop(1, num_generators=1)
    order = []

    async def phase(name, delay_s):
        await asyncio.sleep(delay_s)
        async with loop.colocation.phase(name):
            order.append(name)
            await asyncio.sleep(1)

    async def main():
        await loop.colocation.begin()
        async with loop.colocation.phase(Phase.SYNC):
            pass
        async with loop.colocation.phase(Phase.TRAIN):
            pass
        await asyncio.gather(phase(Phase.TRAIN, 0), phase(Phase.SYNC, 3))

    run(main())
    assert order == ["sync", "train"]


def test_a_lost_generator_is_passed_over_and_the_last_one_ends_the_run(caplog):
    for lost_at in range(1, 12):
        loop = Loop(1, lost_at=[lost_at, None])
        run(loop.run())
        assert loop.version == loop.num_steps
    assert (
        "generator 0 takes part in no more phases: lost executor generator-0 rank 0" in caplog.text
    )
    with pytest.raises(RuntimeError, match="every generator replica is lost"):
        run(Loop(1, lost_at=[4, 9]).run())


def test_a_lost_trainer_ends_the_run():
    loop = Loop(1)
    loop.trainer.lost_at = 5
    with pytest.raises(ExecutorLost, match="trainer"):
        run(loop.run())


def test_the_trace_shows_who_has_the_device_and_when_it_changes_hands(tmp_path):
    loop = Loop(1, num_steps=2)
    loop.some_s = lambda: 1.0
    for tenant in (loop.trainer, *loop.generators.values()):
        tenant.move_s = loop.some_s
    spans = Spans("controller", tmp_path)
    loop.colocation = Colocated(loop.trainer, loop.generators, spans)
    run(loop.run())
    spans.close()
    lines = read_lines(tmp_path / "controller.jsonl")
    phases = [line["who"] for line in lines if line.get("name") == "phase"]
    assert phases == ["both", *["generators", "trainer", "both"] * 2, "generators", "trainer"]
    switches = [line["to"] for line in lines if line.get("name") == "switch"]
    assert switches == ["sync", "sync", *["train", "sync", "sync"] * 2, "train"]


def test_with_devices_of_their_own_executors_neither_wait_nor_offload():
    async def never():
        raise AssertionError("asked")

    async def main():
        placement = Colocation()
        await placement.begin()
        async with placement.phase(Phase.TRAIN, never), placement.phase(Phase.SYNC):
            return True

    assert run(main())


def test_an_early_end_gives_the_trainer_the_device_whichever_generators_are_lost():
    complaints = []

    async def end_early(lost_at):
        asyncio.get_running_loop().set_exception_handler(lambda _, each: complaints.append(each))
        loop = Loop(0, lost_at=lost_at)
        await loop.colocation.begin()
        if lost_at == [1]:
            with pytest.raises(NoGenerator):
                async with loop.colocation.phase(Phase.SYNC):
                    pass
        await loop.colocation.recall()
        assert loop.trainer.is_complete
        gc.collect()

    run(end_early([1]))
    run(end_early([1, None]))
    assert not complaints, "that a lost generator does not answer is no news"
