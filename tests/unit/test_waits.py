"""Waits for calls that may never answer."""

from __future__ import annotations

import asyncio
import time

from llamarl.publish.replica import LATE_S, attempt, failure


async def answer_after(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return 7


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    async def scenario() -> None:
        task = await attempt(answer_after(60), 0.05)
        assert isinstance(failure(task, "it", 0.05), TimeoutError)

    asyncio.run(scenario())


def test_an_answer_counts_that_a_process_which_stood_still_has_not_read() -> None:
    """As after Ctrl-Z and fg: the timer is due long before the answer is read."""

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(time.sleep, LATE_S + 0.3)
        task = await attempt(answer_after(0.1), 0.2)
        assert failure(task, "it", 0.2) is None
        assert task.result() == 7

    asyncio.run(scenario())
