"""The real controller with samplers other than the order of admission."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.planner.simulation.clock import run
from llamarl.scoring.samplers import ReadyItem, Sample
from tests.simulation.loop import COSTS, Loop, slower

HARD = {"drop_share": 0.2, "failed_share": 0.02}
NUM_STEPS = 60


def make_loop(**options: object) -> Loop:
    """Three replicas, one of them slow, so that groups settle out of order."""
    return Loop(
        num_steps=NUM_STEPS,
        num_replicas=3,
        max_num_seqs=8,
        costs=replace(COSTS, part_s=0.05, token_s=0.01),
        faults={"generator-1": slower(decode_step_s=0.05, commit_s=0.2)},
        **HARD,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "max_staleness",
    [1, pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)],
)
def test_parts_of_whole_groups_as_they_settle_keep_the_bound_and_take_less_time(
    max_staleness: int, tmp_path: Path
) -> None:
    seconds = {}
    for sampler in ("admission", "group_complete"):
        loop = make_loop(max_staleness=max_staleness, sampler=sampler, tokens_per_micro_batch=1)
        run(loop.run(tmp_path))
        assert max(loop.staleness() + loop.masked()) <= max_staleness, "nothing needs the mask"
        rows = loop.trained_rows()
        assert len({*rows}) == len(rows) == NUM_STEPS * 4 * 2
        assert (rows == sorted(rows)) == (sampler == "admission")
        seconds[sampler] = loop.timeline.step_ends_s[-1]
    assert seconds["group_complete"] < seconds["admission"]


@pytest.mark.full
@pytest.mark.parametrize("is_colocated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_sampler_of_the_recipe_s_own_chooses_and_the_mask_keeps_the_bound(
    is_colocated: bool, tmp_path: Path
) -> None:
    chosen = random.Random(5)

    def some(ready: Sequence[ReadyItem], count: int) -> Sample:
        if len(ready) < 1.5 * count:
            return [], []
        taken = chosen.sample([item.item_id for item in ready], count)
        return taken, taken

    loop = make_loop(sampler="task", sample=some, late="mask", is_colocated=is_colocated)
    run(loop.run(tmp_path))
    assert max(loop.staleness()) == 1
    assert max(loop.masked()) > 1
    assert {*Counter(loop.trained_rows()).values()} == {1}
    assert loop.storage.count("trained") == NUM_STEPS * 4 * 2


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        "dynamic",
        pytest.param("batch", marks=pytest.mark.long),
    ],
)
def test_groups_are_trained_on_twice_if_they_are_consumed_only_the_second_time(
    parts: str, tmp_path: Path
) -> None:
    def twice(ready: Sequence[ReadyItem], count: int) -> Sample:
        taken = ready[:count]
        consumed = [item.item_id for item in taken if item.times_taken == 1]
        return [item.item_id for item in taken], consumed

    loop = make_loop(
        sampler="task",
        sample=twice,
        late="mask",
        max_staleness=2,
        parts=parts,
        tokens_per_micro_batch=8,
        save_every=7,
    )
    run(loop.run(tmp_path))
    steps: dict[int, list[int]] = {}
    for batch in loop.batches:
        for row in batch.rows:
            steps.setdefault(row.row_id, []).append(batch.version)
    assert all(first != second for first, *rest in steps.values() for second in rest)
    times = Counter(map(len, steps.values()))
    assert times[2] > 0.9 * len(steps)
    assert times.keys() == {1, 2}
    assert loop.storage.count("trained") == len(steps)
    assert max(loop.staleness()) <= 2
