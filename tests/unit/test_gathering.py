"""Answers that wait for each other, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from llamarl.core.batcher import Gathering
from llamarl.planner.simulation.clock import run
from tests.random_search import case, searched

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
    clock = asyncio.get_running_loop().time
    now_ms = lambda: round(clock() * 1000, 3)  # noqa: E731

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

            run(main())
            check(all_asked)


def test_a_single_answer_waits_for_none() -> None:
    async def main() -> float:
        gathering = Gathering()
        await gathering.join(asyncio.sleep(1.0))
        return asyncio.get_running_loop().time()

    assert run(main()) == 1.0


def test_half_of_many_equal_ones_go_on_together_then_half_of_the_rest() -> None:
    async def main() -> list[tuple[int, int]]:
        gathering, clock = Gathering(), asyncio.get_running_loop().time
        order: list[tuple[int, int]] = []

        async def ask_one(place: int) -> None:
            await gathering.join(asyncio.sleep(place * 0.001))
            order.append((place, round(clock() * 1000)))

        await asyncio.gather(*(ask_one(place) for place in range(1, 9)))
        return order

    assert sorted(run(main())) == [(1, 4), (2, 4), (3, 4), (4, 4), (5, 6), (6, 6), (7, 7), (8, 8)]


def test_one_that_is_given_up_while_it_waits_holds_up_none() -> None:
    async def main() -> float:
        gathering = Gathering()
        joins = [asyncio.create_task(gathering.join(asyncio.sleep(at))) for at in (0.1, 0.11, 9)]
        await asyncio.sleep(0.105)
        joins[0].cancel()
        await joins[1]
        joins[2].cancel()
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.11


def test_those_given_up_at_once_some_asked_and_some_waiting_spoil_no_other() -> None:
    """As when what they ask is lost."""

    async def main() -> float:
        gathering = Gathering()
        ends_s = 9.0, 9.0, 9.0, 0.1, 0.1
        *asked, waiting, other = (
            asyncio.create_task(gathering.join(asyncio.sleep(end_s))) for end_s in ends_s
        )
        await asyncio.sleep(0.105)
        given_up = asked[0], waiting
        for each in given_up:
            each.cancel()
        ends = await asyncio.gather(*given_up, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
        await other
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.105


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
                gathering, clock = Gathering(0.02, 0.1), asyncio.get_running_loop().time

                async def ask_one(begin_ms: int, takes_ms: int) -> float:
                    await asyncio.sleep(begin_ms / 1000)
                    await gathering.join(asyncio.sleep(takes_ms / 1000))
                    return clock() - (begin_ms + takes_ms) / 1000

                tasks = [asyncio.create_task(ask_one(*each)) for each in times]
                await asyncio.sleep(given_up_ms / 1000)
                for task, is_given_up in zip(tasks, leaves, strict=True):
                    if is_given_up:
                        task.cancel()
                for waited in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(waited, asyncio.CancelledError):
                        assert isinstance(waited, float), waited
                        assert waited <= 0.1 + EPS
                assert not gathering._waiting
                assert gathering._num_asked == 0

            run(main())
