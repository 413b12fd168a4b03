"""When an executor is pinged, and when it counts as silent or lost; on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from llamarl.cluster.actors import results_by_rank, wait_silent
from llamarl.cluster.executor import LOSS_GRACE_S, failure
from llamarl.core.errors import ExecutorLost
from llamarl.planner.simulation.clock import run

SILENCE_S = 60.0


class FakeActor:
    """An actor whose `ping` is a Monarch endpoint: it answers at once until `hangs_at_s`."""

    def __init__(self, hangs_at_s: float) -> None:
        self.hangs_at_s = hangs_at_s
        self.ping = self
        self.asked_s: list[float] = []

    def stream(self) -> Iterator[FakeActor]:
        yield self

    def as_asyncio(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        self.asked_s.append(loop.time())
        pong = loop.create_future()
        if loop.time() < self.hangs_at_s:
            pong.set_result(None)
        return pong


def test_an_actor_that_answers_calls_is_not_pinged_and_its_silence_is_noticed_as_soon() -> None:
    async def silent_s(calls_s: list[float], hangs_at_s: float) -> tuple[float, list[float]]:
        actor, loop = FakeActor(hangs_at_s), asyncio.get_running_loop()
        answered = [s for s in calls_s if s < hangs_at_s]
        await wait_silent(
            actor, SILENCE_S, lambda: max([s for s in answered if s <= loop.time()], default=-1e9)
        )
        return loop.time(), actor.asked_s

    end_s, asked_s = run(silent_s([10.0 * i for i in range(100)], hangs_at_s=605.0))
    assert asked_s == [615.0], "the only silence was at the end"
    assert end_s <= 605.0 + SILENCE_S
    end_s, asked_s = run(silent_s([], hangs_at_s=100.0))
    assert asked_s == [15.0 * i for i in range(8)]
    assert 100.0 < end_s <= 100.0 + SILENCE_S


def test_what_a_rank_raises_as_its_peer_ends_counts_as_a_loss_that_is_noticed_later() -> None:
    """Its peers may see their connections break before its own end is noticed."""

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        loop.call_later(
            0.9 * LOSS_GRACE_S, lost.set_exception, ExecutorLost("reference", 1, "it ended")
        )
        answer = loop.create_future()
        answer.set_result([failure(RuntimeError("connection reset by peer"), "reference-0", 0)])
        await results_by_rank("reference", iter([answer]), 2, lost)

    with pytest.raises(ExecutorLost, match="reference rank 1: it ended"):
        run(ask())
