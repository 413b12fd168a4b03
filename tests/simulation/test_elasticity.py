"""Scaling by the excess of generation over training, on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.elasticity import wanted_change
from llamarl.core.records import Request
from llamarl.planner.simulation.clock import run
from tests.simulation.loop import COSTS, Loop


@given(
    n=st.integers(1, 64),
    work=st.floats(0.01, 1000),
    train_s=st.floats(0.01, 1000),
    fewest=st.integers(1, 8),
    more=st.integers(0, 64),
)
def test_constant_work_ends_in_a_constant_number_of_replicas_within_the_limits(
    n: int, work: float, train_s: float, fewest: int, more: int
) -> None:
    """`work` is what one replica would take for a step's generation."""
    limits = fewest, fewest + more
    n = min(max(n, limits[0]), limits[1])
    seen = [n]
    while change := wanted_change(n, work / n, train_s, limits):
        n += change
        assert limits[0] <= n <= limits[1]
        assert n not in seen, "it turns back"
        seen.append(n)


@pytest.mark.parametrize(
    ("n", "gen_s", "train_s", "change"),
    [(2, 30.0, 10.0, 1), (2, 12.0, 10.0, 0), (3, 10.0, 30.0, -1), (3, 10.0, 12.0, 0)],
)
def test_a_replica_is_added_once_the_excess_is_what_it_saves(
    n: int, gen_s: float, train_s: float, change: int
) -> None:
    assert wanted_change(n, gen_s, train_s, (1, 8)) == change


def drifting(start: int, end: int, first_row: int, last_row: int):
    """Lengths that go from one value to another while rows `first_row` to `last_row` are asked."""

    def length(request: Request) -> int:
        share = (request.row_id - first_row) / (last_row - first_row)
        return round(start + (end - start) * min(1.0, max(0.0, share)))

    return length


def scaled(loop: Loop, tmp_path: Path) -> list[int]:
    """The number of replicas at each step."""
    numbers: list[int] = []
    log_step = loop.run_logger.log_step

    async def note(*args: object) -> None:
        numbers.append(len(loop.supervisor.replica_states()))
        await log_step(*args)

    loop.run_logger.log_step = note  # type: ignore[method-assign]
    run(loop.run(tmp_path))
    assert loop.trainer.version == loop.num_steps
    return numbers


@pytest.mark.long
def test_lengths_that_double_get_more_replicas_and_shrinking_ones_fewer(tmp_path: Path) -> None:
    """In the proportions of the published test: lengths go from 10k to 20k, in tokens of 0.01 s."""
    num_rows = 60 * 4 * 2
    loop = Loop(
        num_steps=120,
        num_replicas=2,
        elastic=[1, 8],
        max_restarts=1,
        max_num_seqs=1,
        length=drifting(100, 200, num_rows // 2, num_rows),
        costs=replace(COSTS, part_s=1.8, start_s=2.0),
    )
    numbers = scaled(loop, tmp_path / "longer")
    assert numbers[:20] == [2] * 20, "nothing to gain before"
    assert numbers[-1] > 2
    assert numbers == sorted(numbers), "it never turns back"
    loop = Loop(
        num_steps=120,
        num_replicas=4,
        elastic=[1, 8],
        max_restarts=1,
        max_num_seqs=1,
        length=drifting(200, 50, num_rows // 2, num_rows),
        costs=replace(COSTS, part_s=1.8, start_s=2.0),
    )
    numbers = scaled(loop, tmp_path / "shorter")
    assert numbers[-1] < numbers[10]
