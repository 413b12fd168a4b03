"""The saver waits for the version of the step that it has started, and for no other."""

import asyncio

from llamarl.config import CheckpointConfig
from llamarl.loop.saver import Saver


def test_a_step_that_ends_as_the_next_one_starts_does_not_count_as_its_version():
    others = dict.fromkeys(("trainer", "gate", "colocation", "evaluator", "spans"))  # not asked
    saver = Saver(config=CheckpointConfig(), run_dir="", version=0, last=9, **others)

    async def start_two():
        logged = asyncio.Event()

        async def first():
            saver.made(1)
            await logged.wait()

        async def second():
            for _ in range(9):
                await asyncio.sleep(0)
            saver.made(2)

        await saver.start_step(first())
        await asyncio.sleep(0)
        logged.set()
        await asyncio.sleep(0)  # the first step has ended, and its callbacks are still to come
        await saver.start_step(second())
        assert saver.version == 2

    asyncio.run(start_two())
