"""Episodes of several conversations, each a row of its own, on the virtual clock."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from llamarl.core.groups import Group
from llamarl.core.records import RolloutInfo, TurnResult, conversation_row, episode_of
from llamarl.planner.simulation.clock import run
from tests.random_search import case, searched
from tests.simulation.combinations import draw
from tests.simulation.loop import Loop
from tests.simulation.test_loop_search import check, perform


def reports(loop: Loop) -> dict[int, RolloutInfo]:
    """What the controller is told of each rollout that it hands to the run logger."""
    found: dict[int, RolloutInfo] = {}
    log_group = loop.run_logger.log_group

    def note(group: Group, verdict: object) -> None:
        found.update(group.rollouts)
        log_group(group, verdict)  # type: ignore[arg-type]

    loop.run_logger.log_group = note  # type: ignore[method-assign, assignment]
    return found


def episode(row: RolloutInfo) -> TurnResult:
    assert row.episode is not None
    return row.episode


@pytest.mark.parametrize("are_parallel", [False, True])
def test_each_conversation_is_reported_stored_and_trained_as_a_row_of_its_own(
    are_parallel: bool, tmp_path: Path
) -> None:
    loop = Loop(
        num_steps=4,
        most_turns=3,
        most_conversations=4,
        are_parallel=are_parallel,
        segment_tokens=2,
    )
    found = reports(loop)
    run(loop.run(tmp_path))
    check(loop)
    trained = loop.trained_rows()
    assert {*Counter(trained).values()} == {1}
    counts = Counter(episode_of(row)[0] for row in trained)
    assert {*counts.values()} == {1, 2, 3, 4}
    for row_id, count in counts.items():
        rows = found[row_id].sequences
        assert [row.row_id for row in rows] == [conversation_row(row_id, i) for i in range(count)]
        numbers = episode(found[row_id]).numbers
        assert numbers["conversations"] == count
        assert numbers["turns"] == sum(loop.turns_of(row.row_id) for row in rows)
        for row in rows:
            assert row.num_tokens == len(loop.storage.versions[row.row_id]) > 0
    sizes = {row.row_id: row.num_in_rollout for batch in loop.batches for row in batch.rows}
    assert all(
        sizes[row.row_id] == sum(each.num_generated for each in found[row_id].sequences)
        for row_id in counts
        for row in found[row_id].sequences
    )


@searched(few=15, many=1500)
def test_no_combination_of_options_and_faults_loses_a_conversation(seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        options = {
            "most_turns": rng.choice([1, 2, 5]),
            "most_conversations": rng.choice([2, 3, 8]),
            "are_parallel": rng.random() < 0.5,
            "tool_failed_share": rng.choice([0.0, 0.0, 0.05]),
        }
        loop = draw(rng, **options)
        with case(seed), tempfile.TemporaryDirectory() as folder:
            run(perform(loop, rng, Path(folder)))
            check(loop)
