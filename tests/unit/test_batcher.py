"""Calls that are sent together, and calls whose callers wait or give up."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.batcher import Batcher
from llamarl.core.compute import Background
from llamarl.planner.simulation import clock


class Calls:
    """Calls that take `seconds`; what each got and when it began."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.begun: list[tuple[float, list[int]]] = []
        self.num_running = self.most_running = 0

    async def __call__(self, items: list[int]) -> None:
        self.begun.append((asyncio.get_running_loop().time(), items))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.seconds)
        self.num_running -= 1
        if self.error is not None:
            raise self.error


def fail(error: Exception) -> None:
    raise AssertionError(f"a call failed: {error!r}")


@settings(max_examples=50, deadline=None)
@given(
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.5]), min_size=1, max_size=30),
    limit=st.integers(1, 5),
    pause_s=st.sampled_from([0.0, 0.1]),
    in_turn=st.booleans(),
    cancelled=st.sets(st.integers(0, 29)),
)
def test_each_item_is_sent_once_in_order_unless_it_was_cancelled_before(
    delays: list[float], limit: int, pause_s: float, in_turn: bool, cancelled: set[int]
) -> None:
    async def main() -> None:
        calls = Calls(0.3)
        options = {"limit": limit, "pause_s": pause_s, "in_turn": in_turn}
        batcher = Batcher[int](calls, fail, **options)
        futures = []
        for item, delay_s in enumerate(delays):
            futures.append(batcher.ask(item))
            if item in cancelled:
                futures[-1].cancel()
            await asyncio.sleep(delay_s)
        expected = [item for item in range(len(delays)) if item not in cancelled]
        await asyncio.gather(*(futures[item] for item in expected))
        assert [item for _, items in calls.begun for item in items] == expected
        assert all(len(items) <= limit for _, items in calls.begun)
        assert not in_turn or calls.most_running <= 1

    clock.run(main())


def test_after_a_pause_what_came_meanwhile_goes_together() -> None:
    async def main() -> None:
        calls = Calls(1.0)
        batcher = Batcher[int](calls, fail, limit=1, pause_s=5.0)
        futures = [batcher.ask(0)]
        await asyncio.sleep(0.1)
        futures += [batcher.ask(1), batcher.ask(2)]
        await asyncio.gather(*futures)
        times = [begun_s for begun_s, _ in calls.begun]
        assert times == pytest.approx([0.0, 5.0, 5.0]), "no pause while some are left"

    clock.run(main())


def test_a_size_counts_towards_the_limit() -> None:
    async def main() -> None:
        calls = Calls()
        batcher = Batcher[int](calls, fail, limit=10, size=lambda item: item)
        await asyncio.gather(*map(batcher.ask, (4, 4, 4, 4)))
        assert [items for _, items in calls.begun] == [[4, 4, 4], [4]], "about so many"

    clock.run(main())


def test_an_error_of_a_call_is_reported_and_what_waits_for_it_is_not_done() -> None:
    async def main() -> None:
        failed: list[Exception] = []
        batcher = Batcher[int](Calls(1.0, ValueError("of the executor")), failed.append, limit=2)
        futures = [batcher.ask(item) for item in range(3)]
        await asyncio.sleep(2.0)
        assert [str(error) for error in failed] == ["of the executor"] * 2
        assert not any(future.done() for future in futures)

    clock.run(main())


def test_a_batcher_that_is_closed_sends_nothing_more() -> None:
    async def main() -> None:
        calls = Calls(10.0)
        batcher = Batcher[int](calls, fail, limit=1, in_turn=True)
        futures = [batcher.ask(0), batcher.ask(1)]
        await asyncio.sleep(1.0)
        await batcher.close()
        await asyncio.sleep(30.0)
        assert [items for _, items in calls.begun] == [[0]]
        assert not any(future.done() for future in futures)

    clock.run(main())


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
