"""Groups that are open beyond their step, and trained in a later one with masked tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.planner.simulation.clock import run
from tests.loop.loop import COSTS, Loop

NUM_STEPS = 60
GROUPS = 16


def train(tmp_path: Path, carry_over_groups: int, **options: object) -> Loop:
    loop = Loop(
        num_steps=NUM_STEPS,
        groups_per_step=GROUPS,
        late="mask",
        carry_over_groups=carry_over_groups,
        tokens_per_micro_batch=16,
        max_num_seqs=1024,
        costs=replace(COSTS, part_s=0.02, token_s=5e-4),
        **options,  # type: ignore[arg-type]
    )
    run(loop.run(tmp_path / str(carry_over_groups)))
    return loop


@pytest.mark.full
@pytest.mark.parametrize("drop_share", [0.3, pytest.param(0.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_bound_holds_per_trained_token_and_nothing_is_lost_or_trained_twice(
    max_staleness: int, drop_share: float, tmp_path: Path
) -> None:
    loop = train(tmp_path, 4, max_staleness=max_staleness, drop_share=drop_share, num_replicas=2)
    assert max(loop.staleness()) == max_staleness
    assert min(loop.masked()) > max_staleness, "only what is too old is masked"
    assert {*Counter(loop.trained_rows()).values()} == {1}
    assert len(loop.trained_rows()) == NUM_STEPS * GROUPS * 2
    outcomes = Counter(loop.storage.outcomes[row]["outcome"] for row in loop.prompt_of)
    assert outcomes["trained"] == NUM_STEPS * GROUPS * 2
    assert outcomes["dropped"] == 2 * len(loop.run_logger.drops)
    assert outcomes.keys() <= {"trained", "dropped", "unused"}, "every rollout has one outcome"


@pytest.mark.long
def test_at_staleness_0_steps_no_longer_wait_for_the_tail_and_few_tokens_are_masked(
    tmp_path: Path,
) -> None:
    without = train(tmp_path, 0, max_staleness=0)
    carried = train(tmp_path, 4, max_staleness=0)
    assert not without.masked()
    took_s = [loop.timeline.step_ends_s[-1] for loop in (without, carried)]
    assert took_s[1] < 0.8 * took_s[0]
    lost_share = len(carried.masked()) / (len(carried.masked()) + len(carried.staleness()))
    assert 0 < lost_share < 0.5


def test_no_more_groups_are_overtaken_than_may_be_carried_over(tmp_path: Path) -> None:
    loop = train(tmp_path, 4, max_staleness=0)
    taken: set[int] = set()
    num_overtaken = []
    for version in range(NUM_STEPS):
        taken |= {row.group_id for b in loop.batches if b.version == version for row in b.rows}
        num_overtaken.append(len({*range(max(taken))} - taken))
    assert max(num_overtaken) == 4
