"""Which turns meet a fault."""

from __future__ import annotations

import pytest

from llamarl.rehearsal.faults import USUAL, Faults, Injector, read_faults


def test_faults_are_read_by_name() -> None:
    assert read_faults(None) == USUAL
    assert read_faults("none") == Faults()
    assert read_faults("slow=0.5, kill=1") == Faults(slow=0.5, kill=1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sloow=1", "--faults must be one of slow"),
        ("slow", "--faults slow must be a share from 0 to 1"),
        ("kill=2", "--faults kill must be a share from 0 to 1"),
        ("kill=nan", "--faults kill must be a share from 0 to 1"),
        ("", "--faults must be one of"),
    ],
)
def test_other_faults_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_faults(text)


def test_the_same_turns_meet_faults_each_time_and_no_episode_more_than_so_many() -> None:
    def met() -> list[tuple[int, int]]:
        injector = Injector(Faults(fail=0.3), seed=1, most=2)
        found = [
            (row, place)
            for row in range(200)
            for place in range(10)
            if injector.meets("fail", row, 0, place)
        ]
        assert injector.counts == {"fail": len(found)}
        return found

    found = met()
    assert found == met()
    rows = [row for row, _ in found]
    assert max(map(rows.count, rows)) == 2
    assert 150 < len({*rows}) < 200
