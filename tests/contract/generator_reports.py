"""What every generator executor promises of its reports; asked with `generator_contract.py`."""

from __future__ import annotations

import asyncio

from tests.contract.generator_replica import (
    EngineCase,
    Replica,
    collect,
    drive,
    request,
)
from tests.fakes import WatchedStorage


def test_collect_returns_nothing_within_the_heartbeat_when_idle(
    engine_case: EngineCase, run_dir: str
) -> None:
    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        assert await asyncio.wait_for(collect(generator), 5) == []
        assert len(storage.writes) == 0

    drive(engine_case, run_dir, scenario)


def test_rows_are_reported_again_until_they_have_arrived(
    engine_case: EngineCase, run_dir: str
) -> None:
    """Whether an answer was lost, or the one that asked for it."""

    async def scenario(generator: Replica, storage: WatchedStorage) -> None:
        lost = asyncio.create_task(generator.collect(0))
        await asyncio.sleep(0.01)
        await generator.submit([request(0), request(1, max_tokens=20)])
        first, rows = await generator.collect(0)
        assert rows
        same, others = await lost
        num_both = min(len(others), len(rows))  # one was answered later
        assert num_both
        assert (same, others[:num_both]) == (first, rows[:num_both]), "whatever came of it"
        while len(rows) < 2:  # or both at once
            again, more = await generator.collect(first + len(rows))
            assert again == first + len(rows)
            rows += more
        again, kept = await asyncio.wait_for(generator.collect(0), 20)  # not after the heartbeat
        assert kept == rows[again - first :], "at once, what was not said to have arrived"
        assert kept
        waiting = asyncio.create_task(generator.collect(first + 2))
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done(), "all has arrived, so there is nothing to report"
        waiting.cancel()
        assert len(storage.writes) <= 2

    drive(engine_case, run_dir, scenario, heartbeat_s=60.0)
