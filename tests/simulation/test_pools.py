"""Pools that are not equally fast: who gets how much, and what that saves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.balance import FEWEST_ROLLOUTS, Speeds
from llamarl.core.config import EmbeddedConfig
from llamarl.core.config.generator import pools_of
from llamarl.core.records import FinishReason, Purpose, Request, Sampling
from llamarl.planner.simulation import clock
from tests.fakes import stopped
from tests.simulation.loop import Loop, slower


def lengths(request: Request) -> int:
    return random.Random(request.seed).randint(100, 200)


def run_loop(folder: Path, **fields: Any) -> tuple[float, Counter[int]]:
    """Seconds of a run with a fast and a slow replica, and the rows trained by replica."""
    loop = Loop(
        num_steps=20,
        groups_per_step=16,
        rollouts_per_prompt=4,
        max_num_seqs=16,
        length=lengths,
        faults={"generator-1": slower(decode_step_s=0.05)},  # the other one's takes 0.01
        **fields,
    )

    async def main() -> float:
        await loop.run(folder)
        return asyncio.get_running_loop().time()

    seconds = clock.run(main())
    rows = Counter(loop.replica_of.values())
    assert max(loop.staleness()) <= 1
    return seconds, rows


@pytest.mark.long
def test_a_run_that_knows_how_fast_its_pools_are_takes_less_time(tmp_path: Path) -> None:
    equal_s, equal = run_loop(tmp_path, num_replicas=2)
    known_s, known = run_loop(tmp_path, pools=["num_replicas=1", "num_replicas=1"])
    assert known_s < 0.75 * equal_s
    assert 3.0 < known[0] / known[1] < 8.0, "five times as fast"
    assert equal[0] / equal[1] < known[0] / known[1]


def make_speeds(*texts: str) -> Speeds:
    return Speeds(pools_of(EmbeddedConfig(max_num_seqs=4, pools=[*texts])))


def test_at_first_a_pool_counts_by_its_slots() -> None:
    speeds = make_speeds("max_num_seqs=12", "num_replicas=2")
    assert [speeds.of(index) for index in (0, 1, 2, 3)] == [12, 4, 4, 4]
    assert not make_speeds().is_on


def stop(speeds: Speeds, index: int, num_tokens: int, reason: str, resume: bool = False) -> None:
    request = Request(
        row_id=7,
        prompt_ids=(1,),
        sampling=Sampling(max_tokens=64),
        seed=0,
        min_version=0,
        purpose=Purpose.TRAIN,
        resume=resume,
    )
    row = stopped(7, (0, num_tokens), reason=FinishReason(reason))
    speeds.observe(index, request, row)


@pytest.mark.parametrize("num_running", [1, 4, 9])
def test_a_replica_with_little_to_do_does_not_count_as_slow(num_running: int) -> None:
    async def main() -> tuple[float, float]:
        speeds = make_speeds("max_num_seqs=4", "max_num_seqs=4")
        for _ in range(FEWEST_ROLLOUTS):
            for index in (0, 1):
                speeds.note(index, 0)
            await asyncio.sleep(4.0)
            for index, held, step_s in ((0, num_running, 0.1), (1, 4, 0.4)):
                speeds.note(index, held)
                for _ in range(min(held, 4)):
                    stop(speeds, index, round(4.0 / step_s), "stop")
        return speeds.of(0), speeds.of(1)

    fast, slow = clock.run(main())
    assert fast / slow == pytest.approx(4.0, rel=0.01)
    assert slow == pytest.approx(4 / 0.4, rel=0.05)


@pytest.mark.parametrize("is_cut", [True, False])
def test_tokens_of_a_rollout_that_was_cut_count_where_they_were_written(is_cut: bool) -> None:
    async def main() -> float:
        speeds = make_speeds("num_replicas=1", "num_replicas=1")
        for seconds in (0.0, 10.0):
            await asyncio.sleep(seconds)
            for index in (0, 1):
                speeds.note(index, 1)
        for _ in range(FEWEST_ROLLOUTS):
            stop(speeds, 0, 30, "segment" if is_cut else "stop")
            stop(speeds, 1, 50 if is_cut else 20, "stop", resume=is_cut)
        return speeds.of(0) / speeds.of(1)

    assert clock.run(main()) == pytest.approx(1.5)
