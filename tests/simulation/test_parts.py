"""Whole batches, and parts sized by what the trainer needs, on a heavy tail."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from llamarl.planner.simulation.clock import run
from tests.simulation.loop import COSTS, Loop

NUM_STEPS = 40
GROUPS = 16
PARTS = ["batch", "dynamic"]
# The trainer needs about half as long as generation; of a part of 13 groups, about a tenth of it
# is overhead.
TRAINER = replace(COSTS, part_s=0.02, token_s=5e-3)


def train(parts: str, tmp_path: Path, **options: object) -> Loop:
    loop = Loop(
        num_steps=NUM_STEPS,
        groups_per_step=GROUPS,
        parts=parts,
        tokens_per_micro_batch=16,
        max_num_seqs=1024,
        costs=TRAINER,
        **options,  # type: ignore[arg-type]
    )
    run(loop.run(tmp_path / parts))
    return loop


def steps_of(loop: Loop) -> list[list[tuple[int, ...]]]:
    """Per step and part, the rows in their order."""
    steps: list[list[tuple[int, ...]]] = [[] for _ in range(NUM_STEPS)]
    for batch in loop.batches:
        steps[batch.version].append(tuple(row.row_id for row in batch.rows))
    return steps


@pytest.mark.full
@pytest.mark.parametrize("drop_share", [0.3, pytest.param(0.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.long)])
def test_parts_change_when_groups_are_trained_and_neither_which_nor_how_stale(
    max_staleness: int, drop_share: float, tmp_path: Path
) -> None:
    found = {}
    for parts in PARTS:
        loop = train(parts, tmp_path, max_staleness=max_staleness, drop_share=drop_share)
        assert max(loop.staleness() + loop.masked()) == max_staleness, "nothing needs the mask"
        rows = loop.trained_rows()
        assert rows == sorted(rows), "in the order of admission"
        assert len(rows) == len({*rows}) == NUM_STEPS * GROUPS * 2
        found[parts] = [sorted(row for part in step for row in part) for step in steps_of(loop)]
        assert all(len(step) == GROUPS * 2 for step in found[parts])
    if not drop_share:  # else times decide which prompts come after a dropped one
        assert found["batch"] == found["dynamic"], "equal gradients, step by step"


@pytest.mark.full
@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "sampler", ["admission", pytest.param("group_complete", marks=pytest.mark.long)]
)
def test_on_a_heavy_tail_dynamic_parts_take_no_longer_than_batches(
    max_staleness: int, sampler: str, tmp_path: Path
) -> None:
    took = {}
    for parts in PARTS:
        loop = train(parts, tmp_path, max_staleness=max_staleness, sampler=sampler)
        took[parts] = loop.timeline.step_ends_s[-1]
    assert took["dynamic"] <= took["batch"] * 1.01
    if max_staleness == 0 and sampler == "group_complete":
        assert took["dynamic"] < 0.9 * took["batch"]


def test_dynamic_parts_have_the_measured_size_or_are_the_rest_of_their_step(
    tmp_path: Path,
) -> None:
    loop = train("dynamic", tmp_path, max_staleness=0, sampler="group_complete")
    tokens = {
        row.row_id: row.num_tokens + row.num_prompt_tokens for b in loop.batches for row in b.rows
    }
    sizes = [[sum(tokens[row] for row in part) for part in step] for step in steps_of(loop)]
    assert max(map(len, sizes)) > 1
    # 9 a / b: 36 tokens of the slower of two ranks, which has a little more than half of them.
    settled = [size for step in sizes[10:] for size in step[:-1]]
    assert 30 <= min(settled) <= 72
    assert all(earlier <= later for earlier, later in pairwise(loop.part_starts[NUM_STEPS - 1]))


def test_colocated_executors_train_whole_batches(tmp_path: Path) -> None:
    loop = train("dynamic", tmp_path, is_colocated=True, sampler="group_complete")
    assert {*map(len, steps_of(loop))} == {1}
