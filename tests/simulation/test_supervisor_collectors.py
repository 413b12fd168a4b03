"""Collectors that are lost and started again, while the loop runs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import Report
from llamarl.core.records import Request
from llamarl.generator.collector import CollectorWorker
from llamarl.generator.decoding import KeptRows
from llamarl.generator.specs import CollectorSpec
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from tests.fakes import stopped
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop, first_error
from tests.simulation.test_supervisor_replicas import check_trained

RESTART_COSTS = replace(COSTS, start_s=0.3)


def many_lengths(request: Request) -> int:
    return 1 + request.seed % 40


def random_faults(seed: int, num_collectors: int) -> dict[str, Faults]:
    """Each collector dies, also between an answer's making and its arrival, or falls silent, again
    and again."""
    rng = random.Random(seed)
    found: dict[str, Faults] = {}
    for number in range(num_collectors):
        at_s = 0.0
        for i in range(1, 15):
            at_s += rng.uniform(0.2, 2.0)
            kind = rng.choice(["dies", "dies late", "silent", "pauses", "wakes"])
            found[f"collector-{number}" + (f" {i}" if i > 1 else "")] = {
                "dies": Faults(dies_at_s=at_s),
                "dies late": Faults(dies_after={"collect": rng.randint(1, 9)}),
                "silent": Faults(silent_s=(at_s, at_s + 100.0)),
                "pauses": Faults(silent_s=(at_s, at_s + 3.0), dies_at_s=at_s + 4.0),
                "wakes": Faults(silent_s=(at_s, at_s + 37.0), ignores_stop=True),
            }[kind]
            at_s += {"silent": 6.0, "pauses": 5.0, "wakes": 36.0}.get(kind, 1.0)
    return found


@pytest.mark.full
@pytest.mark.parametrize("segment_tokens", [7, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_collectors", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_collectors_lost_at_random_moments_cost_no_rollout_and_none_is_written_twice(
    tmp_path: Path, seed: int, num_collectors: int, segment_tokens: int
) -> None:
    loop = Loop(
        num_steps=60,
        num_replicas=3,
        num_collectors=num_collectors,
        max_stage_restarts=100,
        segment_tokens=segment_tokens,
        length=many_lengths,
        costs=RESTART_COSTS,
        faults=random_faults(seed, num_collectors),
    )
    run(loop.run(tmp_path))
    check_trained(loop)
    assert loop.prompt_of.keys() <= loop.storage.outcomes.keys(), "a rollout without an outcome"
    assert sum(name.startswith("collector") for name in loop.cluster.spawned) > 5
    per_row = -(-40 // segment_tokens) if segment_tokens else 1
    assert max(loop.storage.num_writes.values()) <= per_row
    others = {"generator-0", "generator-1", "generator-2", "trainer", "scorer"}
    assert not {f"{name} 2" for name in others} & loop.cluster.spawned.keys()


def test_replicas_that_come_while_a_collector_is_lost_are_collected_from(tmp_path: Path) -> None:
    async def main() -> None:
        loop = Loop(
            num_collectors=1,
            max_restarts=3,
            max_stage_restarts=1,
            costs=replace(COSTS, start_s=1.0),
            faults={"collector-0": Faults(dies_at_s=2.0), "generator-0": Faults(dies_at_s=2.1)},
        )

        async def scale() -> None:
            await asyncio.sleep(1.5)
            await loop.supervisor.scale(2)
            await asyncio.sleep(0.8)
            (row,) = (each for each in loop.supervisor.status() if each.name == "collector-0")
            assert (row.state, row.num_restarts) == ("starting", 1)

        await asyncio.gather(loop.run(tmp_path), scale())
        check_trained(loop)
        assert {*loop.replica_of.values()} == {0, 1}

    run(main())


def test_a_collector_that_is_lost_too_often_ends_the_run_with_the_key_to_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = {name: Faults(dies_at_s=1.0) for name in ("collector-0", "collector-0 2")}
    loop = Loop(num_collectors=1, max_stage_restarts=1, faults=faults)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    error = first_error(caught.value)
    assert isinstance(error, ExecutorLost)
    assert error.executor == "collector-0"
    assert "cluster.max_restarts=1 times in an hour" in caplog.text


class Written:
    """A replica whose rollouts have all stopped."""

    def __init__(self, row_ids: range) -> None:
        self._kept = KeptRows()
        self._kept.add(stopped(row_id, (0, 1)) for row_id in row_ids)

    async def collect(self, received: int) -> Report:
        self._kept.forget(received)
        if not self._kept:
            await asyncio.Event().wait()
        return self._kept.report()


def test_an_answer_is_given_again_until_the_next_question_says_that_it_arrived() -> None:
    async def main() -> None:
        generators: dict[int, Any] = {0: Written(range(3)), 1: Written(range(10, 12))}
        first, second = (
            CollectorWorker(
                CollectorSpec(generators=generators), rank=0, num_ranks=1, spans=Spans("", None)
            )
            for _ in range(2)
        )
        number, reports = await first.collect(0)
        assert await first.collect(0) == (number, reports), "the answer was lost"
        again, _ = await second.collect(number)
        assert again > number
        assert sorted(reports) == sorted((await second.collect(number))[1]), "first was lost"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await second.collect(again)
        for replica in generators.values():
            assert len(replica._kept) == 0

    run(main())


def test_a_collector_that_began_without_replicas_asks_one_that_comes() -> None:
    async def main() -> None:
        spec = CollectorSpec(generators={})
        collector = CollectorWorker(spec, rank=0, num_ranks=1, spans=Spans("", None))
        collecting = asyncio.create_task(collector.collect(0))
        await asyncio.sleep(0)
        replica: Any = Written(range(3))
        await collector.follow(3, replica)
        _, reports = await asyncio.wait_for(collecting, 60.0)
        assert [index for index, _ in reports] == [3]
        await collector.close()

    run(main())
