"""Which rollouts are kept whole, and what is recorded of them."""

from __future__ import annotations

import datetime
import json

import pytest

from llamarl.core.groups import Group
from llamarl.core.records import Prompt, StageResult, StageStatus
from llamarl.prompts.stream import PromptStream
from llamarl.storage.archive import as_cell, is_kept, make_record

PROMPTS = [Prompt(prompt_id=i, text="", token_ids=(1,)) for i in range(1, 21)]


def chosen(share: float, seed: int = 0) -> set[int]:
    prompts = [Prompt(prompt_id=i, text="", token_ids=(1,)) for i in range(5000)]
    return {each.prompt_id for each in prompts if is_kept(each, share, seed)}


def test_the_share_that_is_kept_is_the_share_that_was_asked_for() -> None:
    assert chosen(0.0) == set()
    assert len(chosen(1.0)) == 5000
    assert len(chosen(0.01)) == pytest.approx(50, abs=25)
    assert len(chosen(0.3)) == pytest.approx(1500, abs=150)
    assert chosen(0.01) < chosen(0.3), "a larger share keeps what a smaller one does"
    assert chosen(0.3, seed=1) != chosen(0.3)


def test_a_stream_that_goes_on_elsewhere_keeps_the_same_prompts() -> None:
    def draw(number: int, **options: object) -> list[tuple[int, int, bool]]:
        stream = PromptStream(PROMPTS, seed=3, shuffle=True, keep=0.4, **options)  # type: ignore[arg-type]
        drawn = [next(stream) for _ in range(number)]
        return [(each.epoch, each.prompt_id, each.is_kept) for each in drawn]

    whole = draw(60)
    assert {is_chosen for _, _, is_chosen in whole} == {True, False}
    by_epoch = [{p for e, p, k in whole if k and e == epoch} for epoch in range(3)]
    assert by_epoch[0] != by_epoch[1], "other prompts in each epoch"
    pending = [whole[33][:2], whole[38][:2]]
    assert draw(22, position=40, first=pending) == [whole[33], whole[38], *whole[40:]]


def test_a_record_says_what_became_of_a_rollout() -> None:
    day = datetime.date(2026, 1, 2)
    prompt = Prompt(prompt_id=5, text="2+2=", token_ids=(1,), fields={"answer": "4", "day": day})
    group = Group(group_id=8, prompt=prompt, row_ids=(3, 4), min_version=0, step=6)
    group.scores[3] = StageResult(row_id=3, parts={"exact": 1.0, "brief": 0.5}, correct=True)
    group.scores[4] = StageResult(row_id=4, status=StageStatus.RAISED, error="KeyError: 'answer'")
    group.numbers[3], group.episodes[3] = {"quality": 2.0}, {"turns": 3.0}
    group.advantages = (0.75, -0.75)
    names = {
        "prompts": ["train.jsonl"],
        "held_out": {"test": "test.jsonl"},
        "functions": ["exact", "brief"],
    }
    right = make_record(group, 3, {"outcome": "trained", "version": 6}, **names)
    assert (right["step"], right["group_id"], right["advantage"]) == (7, 8, 0.75)
    assert (right["prompt_file"], right["prompt_id"], right["prompt"]) == ("train.jsonl", 5, "2+2=")
    assert right["question"] == "2+2="
    assert json.loads(right["fields"]) == {"answer": "4", "day": "2026-01-02"}
    assert json.loads(right["numbers"]) == {"quality": 2.0, "turns": 3.0}
    assert (right["rewards"], right["correct"]) == ({"exact": 1.0, "brief": 0.5}, True)
    failed = make_record(group, 4, {"outcome": "dropped", "reason": "failed_reward"}, **names)
    assert (failed["step"], failed["reason"]) == (7, "failed_reward"), "it was meant for"
    assert (failed["rewards"], failed["correct"]) == ({"exact": None, "brief": None}, None)
    assert failed["error"] == "KeyError: 'answer'"
    assert failed.keys() == right.keys()


def test_of_a_text_that_is_no_utf8_all_else_is_kept() -> None:
    assert json.loads(as_cell({"text": "a\ud800b"}).tobytes()) == {"text": "a?b"}
