"""Calls that are sent together, answers that wait for each other, and callers who give up."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.batcher import Batcher, Gathering
from llamarl.core.compute import Background
from llamarl.planner.simulation import clock
from tests.random_search import case, searched

RUN_TESTS = clock.run


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


async def test_after_a_pause_what_came_meanwhile_goes_together() -> None:
    calls = Calls(1.0)
    batcher = Batcher[int](calls, fail, limit=1, pause_s=5.0)
    futures = [batcher.ask(0)]
    await asyncio.sleep(0.1)
    futures += [batcher.ask(1), batcher.ask(2)]
    await asyncio.gather(*futures)
    times = [begun_s for begun_s, _ in calls.begun]
    assert times == pytest.approx([0.0, 5.0, 5.0]), "no pause while some are left"


async def test_a_size_counts_towards_the_limit() -> None:
    calls = Calls()
    batcher = Batcher[int](calls, fail, limit=10, size=lambda item: item)
    await asyncio.gather(*map(batcher.ask, (4, 4, 4, 4)))
    assert [items for _, items in calls.begun] == [[4, 4, 4], [4]], "about so many"


async def test_an_error_of_a_call_is_reported_and_what_waits_for_it_is_not_done() -> None:
    failed: list[Exception] = []
    batcher = Batcher[int](Calls(1.0, ValueError("of the executor")), failed.append, limit=2)
    futures = [batcher.ask(item) for item in range(3)]
    await asyncio.sleep(2.0)
    assert [str(error) for error in failed] == ["of the executor"] * 2
    assert not any(future.done() for future in futures)


async def test_a_batcher_that_is_closed_sends_nothing_more() -> None:
    calls = Calls(10.0)
    batcher = Batcher[int](calls, fail, limit=1, in_turn=True)
    futures = [batcher.ask(0), batcher.ask(1)]
    await asyncio.sleep(1.0)
    await batcher.close()
    await asyncio.sleep(30.0)
    assert [items for _, items in calls.begun] == [[0]]
    assert not any(future.done() for future in futures)


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


async def test_a_failure_comes_back_to_the_caller_that_waits() -> None:
    wait = asyncio.Event()
    wait.set()
    with pytest.raises(ValueError, match="it failed"):
        await Background().wait_for(fail_after(wait))


EPS = 0.01
QUIET_MS, LIMIT_MS = 20.5, 100.25  # never when another answer comes


@dataclass
class Asked:
    """A question: when it is asked, answered (or fails), given up, and when it went on."""

    asked_ms: int
    ends_ms: int
    fails: bool
    given_up_ms: int | None = None
    went_on_ms: float | None = None

    def is_open(self, ms: float) -> bool:
        return self.asked_ms <= ms < min(self.ends_ms, self.given_up_ms or self.ends_ms)


async def ask(gathering: Gathering, asked: Asked) -> None:
    loop = asyncio.get_running_loop()
    now_ms = lambda: round(loop.time() * 1000, 3)  # noqa: E731

    async def answer() -> int:
        await asyncio.sleep((asked.ends_ms - now_ms()) / 1000)
        if asked.fails:
            raise ConnectionError("lost")
        return asked.ends_ms

    await asyncio.sleep(asked.asked_ms / 1000)
    joining = asyncio.ensure_future(gathering.join(answer()))
    if asked.given_up_ms is not None:
        await asyncio.wait({joining}, timeout=(asked.given_up_ms - now_ms()) / 1000)
        joining.cancel()
    try:
        assert await joining == asked.ends_ms
        asked.went_on_ms = now_ms()
    except asyncio.CancelledError:
        assert asked.given_up_ms == now_ms(), "what is given up ends at once"
    except ConnectionError:
        assert asked.fails
        assert now_ms() == asked.ends_ms, "an error waits for none"


def check(all_asked: list[Asked]) -> None:
    """By the rule alone: who waits when one goes on, and that none could have gone on before."""
    answered = [asked for asked in all_asked if not asked.fails and asked.given_up_ms is None]
    out = {id(asked): asked.went_on_ms for asked in answered if asked.went_on_ms is not None}
    assert len(out) == len(answered) == sum(a.went_on_ms is not None for a in all_asked)
    moments = [a.ends_ms if a.given_up_ms is None else a.given_up_ms for a in all_asked]

    def waiting(ms: float) -> list[Asked]:
        return [a for a in answered if a.ends_ms <= ms <= out[id(a)]]

    def is_due(ms: float) -> bool:
        return len(waiting(ms)) >= sum(a.is_open(ms) for a in all_asked)

    for asked in answered:
        end_ms = out[id(asked)]
        together = waiting(end_ms)
        assert {out[id(each)] for each in together} == {end_ms}, "all that wait go on"
        is_quiet = end_ms - max(a.ends_ms for a in together) >= QUIET_MS - EPS
        is_late = end_ms - min(a.ends_ms for a in together) >= LIMIT_MS - EPS
        assert is_due(end_ms) or is_quiet or is_late, "none goes on too soon"
        assert end_ms - asked.ends_ms <= LIMIT_MS + EPS, "none waits longer"
        last_ms = max(a.ends_ms for a in together)
        assert end_ms - last_ms <= QUIET_MS + EPS, "none waits in quiet"
        for ms in (m for m in moments if asked.ends_ms <= m < end_ms):
            assert not is_due(ms), "none goes on too late"


def draw(rng: random.Random) -> list[Asked]:
    """No two things happen in one millisecond, and none when a time is over."""
    span = rng.choice([40, 150, 600])
    times = rng.sample(range(1, span), 3 * rng.randint(1, 12))
    found = []
    for first, second, third in zip(times[::3], times[1::3], times[2::3], strict=True):
        begin, *rest = sorted((first, second, third))
        given_up_ms = min(rest) if rng.random() < 0.1 else None
        found.append(Asked(begin, max(rest), rng.random() < 0.1, given_up_ms))
    return found


@searched(few=200, many=5000)
def test_answers_go_on_with_as_many_as_are_still_to_come_or_after_a_pause(
    seeds: list[int],
) -> None:
    for seed in seeds:
        with case(seed):
            all_asked = draw(random.Random(seed))

            async def main(all_asked: list[Asked] = all_asked) -> None:
                gathering = Gathering(QUIET_MS / 1000, LIMIT_MS / 1000)
                await asyncio.gather(*(ask(gathering, asked) for asked in all_asked))

            clock.run(main())
            check(all_asked)


@searched(few=100, many=3000)
def test_whatever_is_given_up_at_one_moment_the_others_go_on_in_time(seeds: list[int]) -> None:
    for seed in seeds:
        with case(seed):
            rng = random.Random(seed)
            times = [(rng.randint(0, 40), rng.randint(1, 200)) for _ in range(rng.randint(2, 12))]
            leaves = [rng.random() < 0.5 for _ in times]
            given_up_ms = rng.randint(1, 240)

            async def main(
                times: list[tuple[int, int]] = times,
                leaves: list[bool] = leaves,
                given_up_ms: int = given_up_ms,
            ) -> None:
                gathering, now_s = Gathering(0.02, 0.1), asyncio.get_running_loop().time

                async def ask_one(begin_ms: int, takes_ms: int) -> float:
                    await asyncio.sleep(begin_ms / 1000)
                    await gathering.join(asyncio.sleep(takes_ms / 1000))
                    return now_s() - (begin_ms + takes_ms) / 1000

                tasks = [asyncio.create_task(ask_one(*each)) for each in times]
                await asyncio.sleep(given_up_ms / 1000)
                for task, is_given_up in zip(tasks, leaves, strict=True):
                    if is_given_up:
                        task.cancel()
                for waited in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(waited, asyncio.CancelledError):
                        assert isinstance(waited, float), waited
                        assert waited <= 0.1 + EPS
                begun_s = now_s()
                await gathering.join(asyncio.sleep(0))
                assert now_s() == begun_s, "nothing that was given up is waited for"

            clock.run(main())
