"""Several optimizer steps per batch in the real loop, on the virtual clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from llamarl.core import checkpoint
from llamarl.planner.simulation.clock import run
from tests.simulation.loop import Loop


def make_loop(**fields: object) -> Loop:
    fields = {"groups_per_step": 2, "num_mini_batches": 2, "num_passes": 2} | fields
    return Loop(**({"max_staleness": 3, "num_steps": 8, "parts": "batch"} | fields))  # type: ignore[arg-type]


def groups_of_steps(loop: Loop) -> list[list[int]]:
    found: list[set[int]] = [set() for _ in range(loop.trainer.version)]
    for batch in loop.batches:
        found[batch.version] |= {row.group_id for row in batch.rows}
    return [sorted(groups) for groups in found]


def test_the_steps_of_a_batch_walk_through_its_mini_batches_in_every_pass(tmp_path: Path) -> None:
    loop = make_loop()
    run(loop.run(tmp_path))
    one, other = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
    assert groups_of_steps(loop) == [*one, *one, *other, *other]
    assert loop.run_logger.versions == [*range(1, 9)], "each step makes a version"
    assert max(loop.staleness()) <= 3
    outcomes = loop.storage.outcomes
    last = {row: found["version"] for row, found in outcomes.items() if "num_uses" in found}
    assert {loop.group_of[row]: version for row, version in last.items()} == {
        **dict.fromkeys([0, 1], 2),
        **dict.fromkeys([2, 3], 3),
        **dict.fromkeys([4, 5], 6),
        **dict.fromkeys([6, 7], 7),
    }


def test_every_version_is_published_and_written_with(tmp_path: Path) -> None:
    loop = make_loop(max_staleness=5, num_steps=24, segment_tokens=1)
    run(loop.run(tmp_path))
    assert {*loop.timeline.offered_s} == {*range(25)}
    written = {v for versions in loop.storage.versions.values() for v in versions}
    assert len(written) > 12, "generators take versions amid batches too"


def test_the_first_step_waits_for_the_whole_batch_only_if_it_looks_ahead(tmp_path: Path) -> None:
    """A first part may start although the groups of the batch's last mini-batch are not written."""
    ends: dict[str, float] = {}
    for proximal in ("none", "recompute"):
        loop = make_loop(
            proximal=proximal,
            num_steps=2,
            num_passes=1,
            max_staleness=1,
            length=lambda request: 2 if request.step == 0 else 100,
        )
        run(loop.run(tmp_path / proximal))
        ends[proximal] = loop.timeline.step_ends_s[0]
        assert {loop.group_of[row] for row in loop.ahead} == (
            {2, 3} if proximal != "none" else set()
        )
    assert ends["none"] + 0.5 < ends["recompute"]


def test_a_run_that_ends_amid_a_batch_has_trained_what_it_used_and_asks_for_the_rest_again(
    tmp_path: Path,
) -> None:
    loop = make_loop(num_steps=5, save_every=3)
    run(loop.run(tmp_path))
    one, other = [[0, 1], [2, 3]], [[4, 5], [6, 7]]
    assert groups_of_steps(loop) == [*one, *one, other[0]]
    found = {
        loop.group_of[row]: o for row, o in loop.storage.outcomes.items() if row in loop.group_of
    }
    assert Counter(found[group]["outcome"] for group in range(8)) == {"trained": 6, "unused": 2}
    assert [found[4]["version"], found[4].get("num_uses")] == [4, None]
    between, last = [checkpoint.read_state(path) for path in checkpoint.committed(tmp_path)]
    assert between["version"] == 4, "3 is amid the batch"
    assert last["version"] == 5
    asked = [prompt for _, prompt in last["pending"]]
    prompts = {loop.group_of[row]: prompt for row, (_, prompt) in loop.prompt_of.items()}
    assert asked[:2] == [prompts[group] for group in (6, 7)], "one pass was all for 4 and 5"
    again = make_loop(num_steps=8, state=last)
    run(again.run(tmp_path / "again"))
    used = [sorted({again.prompt_of[row.row_id][1] for row in b.rows}) for b in again.batches]
    assert used[0] == sorted(asked[:2])
    assert used[2] == used[0], "the resumed run begins with a new batch"
