"""When the saver lets training go on: after the version of the step that it has started, and while
a checkpoint is written."""

import asyncio
import errno
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llamarl.controller.colocation import Colocation
from llamarl.controller.saver import Saver
from llamarl.core import checkpoint
from llamarl.core.config import CheckpointConfig
from llamarl.metrics.held_out import BestVersion
from llamarl.metrics.span import Spans
from llamarl.trainer.packing import MiniBatches
from tests.fakes import SHARD, SavingTrainer


async def test_a_step_that_ends_as_the_next_one_starts_does_not_count_as_its_version():
    saver = saver_of(None, "")
    logged = asyncio.Event()

    async def first():
        make(saver, 1)
        await logged.wait()

    async def second():
        for _ in range(9):
            await asyncio.sleep(0)
        make(saver, 2)

    await saver.start_step(first())
    await asyncio.sleep(0)
    logged.set()
    await asyncio.sleep(0)  # the first step has ended, and its callbacks are still to come
    await saver.start_step(second())
    assert saver.version == 2


async def measure_nothing(version: int, last: int, whole: object) -> None:
    """As an evaluation that needs a publish."""


def test_a_step_that_is_cancelled_before_it_starts_is_closed():
    saver = saver_of(None, "")

    async def logged_for_ever():
        make(saver, 1)
        await asyncio.Event().wait()

    async def next_step():
        make(saver, 2)

    async def cancel():
        await saver.start_step(logged_for_ever())
        step = next_step()
        starting = asyncio.create_task(saver.start_step(step))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        return inspect.getcoroutinestate(step)

    assert asyncio.run(cancel()) == inspect.CORO_CLOSED, "else Python warns of it as it is deleted"


class Gate:
    """A gate whose state is the number of groups drawn so far; a batch is one step."""

    solved = ""
    ended = ""

    def __init__(self):
        self.num_drawn = 0
        self.steps = MiniBatches(groups_per_step=1)

    def state(self, version):
        return {"next_group_id": self.num_drawn}


def saver_of(trainer, run_dir, version=0):
    return Saver(
        config=CheckpointConfig(keep=0, every_steps=1),
        run_dir=str(run_dir),
        engines=SimpleNamespace(trainer=trainer, gate=Gate(), version=version),
        colocation=Colocation(),
        evaluator=SimpleNamespace(
            measure_before_save=measure_nothing,
            version=-1,
            best=BestVersion(),
            is_wanted=lambda version: False,
            note_saved=lambda version: None,
        ),
        spans=Spans("controller", None),
        last=9,
    )


def make(saver, version):
    saver.engines.version = version
    saver.made()


async def make_version(saver, trainer, version):
    async def step():
        trainer.version = version
        make(saver, version)

    await saver.start_step(step())


async def run_stage(stage):
    """A run whose stages share `tasks`."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage(tasks))


def saved(run_dir):
    """Of each checkpoint: the state's version, the trainer's, the number of groups drawn."""
    states = [(path, checkpoint.read_state(path)) for path in checkpoint.committed(run_dir)]
    return [
        (state["version"], int((path / SHARD).read_text()), state["next_group_id"])
        for path, state in states
    ]


async def test_without_memory_for_a_copy_training_waits_for_the_save(tmp_path):
    trainer = SavingTrainer(waits=True, has_room=False)
    saver = saver_of(trainer, tmp_path)
    async with asyncio.TaskGroup() as tasks:
        await make_version(saver, trainer, 1)
        saving = asyncio.create_task(saver.save(tasks))
        await asyncio.sleep(0.01)
        assert not saving.done()
        trainer.may_write.set()
        await saving
        assert saved(tmp_path) == [(1, 1, 0)]


@pytest.mark.parametrize("is_repaired", [False, True])
async def test_a_save_that_fails_beside_training_ends_it_and_is_tried_again(is_repaired, tmp_path):
    trainer = SavingTrainer(waits=True)
    saver = saver_of(trainer, tmp_path)
    trainer.error = OSError(errno.ENOSPC, "the disk is full")

    async def steps(tasks):
        await make_version(saver, trainer, 1)
        await saver.save(tasks)
        await make_version(saver, trainer, 2)
        trainer.may_write.set()
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run_stage(steps)
    assert caught.value.exceptions == (trainer.error,)
    if is_repaired:
        trainer.error = None
    await saver.rescue()
    assert saved(tmp_path) == ([(2, 2, 0)] if is_repaired else [])


async def test_an_end_amid_a_save_waits_for_it_and_saves_what_came_after(tmp_path):
    trainer = SavingTrainer(waits=True)
    saver = saver_of(trainer, tmp_path)

    async def steps(tasks):
        await make_version(saver, trainer, 1)
        await saver.save(tasks)
        await make_version(saver, trainer, 2)
        raise RuntimeError("a stage failed")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await run_stage(steps)
    asyncio.get_running_loop().call_later(0.02, trainer.may_write.set)
    await saver.rescue()
    assert saved(tmp_path) == [(1, 1, 0), (2, 2, 0)]


async def test_a_stream_of_drops_does_not_keep_a_save_waiting_and_none_is_amid_it(tmp_path):
    trainer = SavingTrainer()
    saver = saver_of(trainer, tmp_path)
    ended, under_way = [], set()

    async def drop():
        saver.engines.gate.num_drawn += 1  # the state changes first, then the records
        await asyncio.sleep(0.005)
        ended.append(saver.engines.gate.num_drawn)

    async def stream():
        while True:  # the next begins before the one before has ended
            task = asyncio.create_task(saver.whole(drop()))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            await asyncio.sleep(0.001)

    drops = asyncio.create_task(stream())
    await asyncio.sleep(0.02)
    async with asyncio.TaskGroup() as tasks:
        await make_version(saver, trainer, 1)
        async with asyncio.timeout(1.0):
            await saver.save(tasks)
    drops.cancel()
    await asyncio.gather(drops, *under_way, return_exceptions=True)
    ((_, _, num_drawn),) = saved(tmp_path)
    assert 0 < num_drawn < len(ended), "drops go on after it"


async def test_the_first_version_of_a_run_that_makes_no_step_is_saved_but_not_as_the_best(tmp_path):
    trainer = SavingTrainer()
    trainer.version = 0
    saver = saver_of(trainer, tmp_path)
    saver.config, saver.last = replace(saver.config, export=False), 0
    saver.engines.gate.solved = "every prompt is solved"
    async with asyncio.TaskGroup() as tasks:
        await saver.save(tasks)
    await saver.export()
    assert saved(tmp_path) == [(0, 0, 0)]
    assert checkpoint.marked_best(tmp_path) is None
