"""How records travel between processes."""

from __future__ import annotations

import pickle

from llamarl.core.records import StageResult, StageStatus, WireList


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
