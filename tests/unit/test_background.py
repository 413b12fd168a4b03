"""Calls beside the compute thread whose callers wait, or give up."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from llamarl.core.compute import Background


async def fail_after(wait: asyncio.Event) -> None:
    await wait.wait()
    raise ValueError("it failed")


def test_a_call_that_fails_after_its_caller_gave_up_ends_and_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        background, wait = Background(), asyncio.Event()
        caller = asyncio.create_task(background.wait_for(fail_after(wait)))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        with pytest.raises(RuntimeError, match="1 calls must end within"):
            await background.drained(0.01)
        wait.set()
        await background.drained(5.0)
        gc.collect()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.records == []


def test_a_failure_comes_back_to_the_caller_that_waits() -> None:
    async def main() -> None:
        wait = asyncio.Event()
        wait.set()
        with pytest.raises(ValueError, match="it failed"):
            await Background().wait_for(fail_after(wait))

    asyncio.run(main())
