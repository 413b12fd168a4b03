"""The real loop under whole combinations of options and faults, on the virtual clock."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

from llamarl.core.records import StageStatus, conversation_row, episode_of
from llamarl.planner.simulation.clock import run
from tests.random_search import case, searched
from tests.simulation.combinations import draw, due_evaluations
from tests.simulation.loop import Loop

LIMIT_S = 20_000.0  # of virtual time: a loop that stands still ends there


async def scale(loop: Loop, rng: random.Random) -> None:
    """Ask for other numbers of replicas, as a user would."""
    for _ in range(rng.randint(1, 4)):
        await asyncio.sleep(rng.choice([0.1, 1.0, 5.0]) * rng.random())
        await loop.supervisor.scale(rng.randint(1, 4), drains=rng.random() < 0.5)


async def perform(loop: Loop, rng: random.Random, folder: Path) -> bool:
    """Run the loop; returns whether its replicas were scaled meanwhile."""
    scales = not (loop.is_colocated or loop.elastic) and rng.random() < 0.3
    scaling = asyncio.create_task(scale(loop, rng)) if scales else None
    try:
        async with asyncio.timeout(LIMIT_S):
            await loop.run(folder)
        return scales
    finally:
        if scaling is not None:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)


def check(loop: Loop) -> None:
    """Every step was made once of whole groups within the bound, every rollout has one outcome
    (`WatchedStorage` asserts the one), and evaluations are whole."""
    first, last = loop.state.get("version", 0), loop.trainer.version
    assert last == loop.num_steps or loop.gate.solved or loop.gate.ended
    assert loop.run_logger.versions == [*range(first + 1, last + 1)]
    check_steps(loop)
    assert max(loop.staleness(), default=0) <= loop.max_staleness
    if loop.late == "wait":
        assert not loop.masked()
    check_outcomes(loop)
    evaluated = [each.version for each in loop.run_logger.evaluations]
    evaluated.insert(0, loop.state.get("evaluated", -1))
    assert evaluated == sorted({*evaluated})
    assert {each.num_prompts for each in loop.run_logger.evaluations} <= {loop.num_held_out}
    is_evaluated = not loop.num_held_out or evaluated[-1] == last
    # A run that is over before its first step has one evaluation, which lost replicas may cost it.
    assert is_evaluated or (loop.gate.ended and last == first and loop.faults)


def check_steps(loop: Loop) -> None:
    """A step has so many groups, each once and whole but for what its stages dropped: every
    conversation of an episode."""
    outcomes = loop.storage.outcomes
    left_out = {row for row, found in outcomes.items() if found.get("left_out")}
    trained = Counter((batch.version, row.row_id) for batch in loop.batches for row in batch.rows)
    assert {*trained.values()} <= {1}, "a step was trained on a rollout twice"
    rows_of: dict[int, set[int]] = {}
    for row, group in loop.group_of.items():
        rows_of.setdefault(group, set()).add(row)
    for version in range(loop.state.get("version", 0), loop.trainer.version):
        rows = {row for found, row in trained if found == version}
        groups = {loop.group_of[episode_of(row)[0]] for row in rows}
        assert len(groups) == loop.groups_per_step
        whole = {row for group in groups for row in rows_of[group]} - left_out
        assert rows == {
            conversation_row(row, number)
            for row in whole
            for number in range(loop.conversations_of(row))
        }
        for row, stage in product(whole, loop.stages):
            result = loop.workload.pass_stage(stage, row)
            assert (result.reason, result.status) == ("", StageStatus.OK), "it was dropped"
    if loop.sampler != "task":
        check_batches(loop, {*trained})
    if loop.sampler == "admission" and loop.late == "wait":
        first_pass = [each for each in loop.batches if steps_before(loop, each.version)[1] == 0]
        order = [row.group_id for batch in first_pass for row in batch.rows]
        assert order == sorted(order)


def steps_before(loop: Loop, version: int) -> tuple[int, int, int]:
    """(first version of the batch, whole passes before this step, steps before it in its pass)."""
    first = loop.state.get("version", 0)
    per_batch = loop.num_mini_batches * loop.num_passes
    step = (version - first) % per_batch
    return version - step, step // loop.num_mini_batches, step % loop.num_mini_batches


def check_batches(loop: Loop, trained: set[tuple[int, int]]) -> None:
    """A rollout is trained once in each pass of one batch, by the same step of each; and if the
    ratio is taken to the policy before the first step, its log-probs were found then."""
    uses: dict[int, list[int]] = {}
    for version, row in sorted(trained):
        uses.setdefault(row, []).append(version)
    last = loop.trainer.version - 1
    for row, versions in uses.items():
        first = versions[0]
        start, num_passes, place = steps_before(loop, first)
        assert num_passes == 0
        wanted = [first + loop.num_mini_batches * i for i in range(loop.num_passes)]
        # The step that was begun last may have used it without making a version.
        made = [version for version in wanted if version <= last]
        assert made == [version for version in versions if version <= last]
        if loop.proximal == "recompute" and place > 0:
            assert loop.ahead[row] == start
    for batch in loop.batches:
        if batch.first_version is not None:
            assert batch.first_version == steps_before(loop, batch.version)[0]


def check_outcomes(loop: Loop) -> None:
    """What was trained on is archived so, with its last step, and nothing is left in storage but
    what replicas write of rollouts that the run's end cuts off."""
    made = [batch for batch in loop.batches if batch.version < loop.trainer.version]
    last_step = {episode_of(row.row_id)[0]: batch.version for batch in made for row in batch.rows}
    outcomes = loop.storage.outcomes
    trained = {row: o["version"] for row, o in outcomes.items() if o["outcome"] == "trained"}
    assert trained == last_step
    uses = Counter(i for batch in made for i in {episode_of(row.row_id)[0] for row in batch.rows})
    assert all(outcomes[row].get("num_uses", 1) == num for row, num in uses.items())
    assert loop.prompt_of.keys() <= outcomes.keys(), "a rollout without an outcome"
    assert "lost" not in {found["outcome"] for found in outcomes.values()}
    rows_left = loop.storage._table.groups(loop.storage._table.with_conversations([*outcomes]))
    left = {outcomes[episode_of(row)[0]]["outcome"] for rows, _ in rows_left for row in rows}
    assert left <= {"unused"}, "rows were left in storage"


@searched(few=40, many=4000)
def test_no_combination_of_options_and_faults_breaks_a_promise(seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        loop = draw(rng)
        with case(seed), tempfile.TemporaryDirectory() as folder:
            scales = run(perform(loop, rng, Path(folder)))
            check(loop)
            if not (loop.faults or scales):
                evaluated = [each.version for each in loop.run_logger.evaluations]
                assert evaluated == due_evaluations(loop)
