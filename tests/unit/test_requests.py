"""Requests are a function of the group alone; replayed lengths are checked and cycled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.core.groups import Group
from llamarl.core.records import Prompt, Sampling
from llamarl.prompts.stream import make_requests, read_lengths

SAMPLING = Sampling(max_tokens=9, stop_token_ids=(2,))


def group(group_id: int, first_row: int) -> Group:
    prompt = Prompt(prompt_id=7, text="q", token_ids=(1, 2, 3), epoch=1)
    row_ids = tuple(range(first_row, first_row + 3))
    return Group(group_id=group_id, prompt=prompt, row_ids=row_ids, min_version=3)


def test_the_same_prompt_draws_the_same_rollouts_after_a_resume() -> None:
    before = make_requests(group(5, 10), sampling=SAMPLING, seed=1, segment_tokens=0)
    after = make_requests(group(8, 90), sampling=SAMPLING, seed=1, segment_tokens=0)
    assert [r.seed for r in before] == [r.seed for r in after]
    assert len({r.seed for r in before}) == 3
    assert {r.min_version for r in before} == {3}
    other = make_requests(group(5, 10), sampling=SAMPLING, seed=2, segment_tokens=0)
    assert not {r.seed for r in before} & {r.seed for r in other}


def test_replayed_lengths_are_written_in_order_and_nothing_else_ends_a_rollout() -> None:
    requests = make_requests(
        group(2, 0), sampling=SAMPLING, seed=0, segment_tokens=0, replay_lengths=[4, 5, 6, 7]
    )
    assert [r.replay_tokens for r in requests] == [6, 7, 4]
    assert {r.sampling.max_tokens for r in requests} == {SAMPLING.max_tokens}  # dispatch sees none
    assert {r.sampling.stop_token_ids for r in requests} == {()}


@pytest.mark.parametrize("content", ["[1, 0]", "[10]", "[]", "[1.5]", '{"a": 1}', "[1", "[true]"])
def test_wrong_lengths_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="lengths"):
        read_lengths(path, 9)
    path.write_text(json.dumps([1, 9]))
    assert read_lengths(path, 9) == [1, 9]
