"""How records travel between processes."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from llamarl.core.records import (
    EpisodeState,
    Prompt,
    StageResult,
    StageStatus,
    TurnItem,
    TurnResult,
    WireList,
    as_json,
    read_json,
)
from llamarl.scoring.definition import Kind

PROMPT = Prompt(prompt_id=3, text="q", token_ids=(1, 2), fields={"answer": [1, {"a": None}]})


def test_a_list_of_records_arrives_as_it_was_and_in_less_than_they_take_one_by_one() -> None:
    results = [
        StageResult(row_id=1, numbers={"quality": 0.5}),
        StageResult(row_id=2, status=StageStatus.RAISED, error="no"),
        *(StageResult(row_id=row_id, reason="unlucky") for row_id in range(3, 50)),
    ]
    packed = pickle.dumps(WireList(results))
    assert pickle.loads(packed) == results
    assert type(pickle.loads(packed)) is list
    assert len(packed) < len(pickle.dumps(results))
    assert pickle.loads(pickle.dumps(WireList([]))) == []


@pytest.mark.parametrize(
    "record",
    [
        PROMPT,
        TurnItem(row_id=1, attempt=2, prompt=PROMPT),
        TurnItem(row_id=1, attempt=0, ids=(7, 8), is_cut=True, room=9),
        TurnResult(row_id=1, attempt=0, state=EpisodeState.LOST, status=StageStatus.HUNG),
        TurnResult(
            row_id=1,
            attempt=0,
            state=EpisodeState.DONE,
            prompt_ids=(5,),
            rewards=(0.5,),
            reward=1.0,
        ),
        Kind(({"type": "function"},), rewards=("solved",)),
    ],
)
def test_a_record_comes_back_from_json_with_its_own_types(record: Any) -> None:
    found = read_json(type(record), json.loads(json.dumps(as_json(record))))
    assert found == record
    for name in record.__slots__:
        assert type(getattr(found, name)) is type(getattr(record, name)), name
