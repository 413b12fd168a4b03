"""On several hosts rollouts are stored where they are written, and no replica waits for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.balance import Neighbours, RowIds
from llamarl.controller.wiring import make_dispatch
from llamarl.core.config.rank_assignment import assign, num_storage_units, units_near
from llamarl.core.groups import Group
from llamarl.generator.protocol import RequestOutput
from llamarl.planner.simulation.clock import run
from tests.simulation.faults import Faults
from tests.simulation.loop import Loop, slower


@given(
    st.integers(0, 50),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 4)), max_size=20),
)
def test_no_row_id_is_given_out_twice_also_after_a_resume(
    first: int, num_units: int, takes: list[tuple[int, int | None]]
) -> None:
    ids, given = RowIds(first, num_units), Counter[int]()
    for count, unit in takes:
        unit = None if unit is None else unit % num_units
        taken = ids.take(count, unit)
        assert len(taken) == count
        assert unit is None or {row_id % num_units for row_id in taken} <= {unit}
        given.update(taken)
    assert not given or max(given.values()) == 1
    assert all(first <= row_id < ids.end for row_id in given)
    again = RowIds(ids.end, num_units).take(9)
    assert not given.keys() & again


def test_row_ids_of_no_unit_follow_one_another() -> None:
    for num_units in (1, 3):
        ids = RowIds(7, num_units)
        assert (ids.take(4), ids.take(0), ids.take(3)) == ((7, 8, 9, 10), (), (11, 12, 13))
        assert ids.end == 14


def test_the_units_of_a_host_take_turns() -> None:
    neighbours = Neighbours({0: [0, 2], 1: [0, 2], 2: [1, 3]}, 4)
    assert sorted(neighbours.unit_of(replica) for replica in (0, 1, 0, 1)) == [0, 0, 2, 2]
    assert sorted(neighbours.unit_of(2) for _ in range(2)) == [1, 3]
    assert (neighbours.near(6), neighbours.near(7)) == ({0, 1}, {2})


class PlacedLoop(Loop):
    """Notes which replica wrote each trained rollout, and how much each had to write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups: list[Group] = []
        self.written: Counter[int] = Counter()  # tokens by replica
        self.so_far: dict[int, int] = {}  # tokens of rollouts that were cut
        for replica in range(self.num_replicas):
            self.watch(self.process(f"generator-{replica}").executor)
        log_step = self.run_logger.log_step

        async def note(stats: Any, groups: Any, *details: Any) -> None:
            self.groups += groups
            self.end_s = asyncio.get_running_loop().time()
            await log_step(stats, groups, *details)

        self.run_logger.log_step = note  # type: ignore[method-assign]

    def share_at_home(self, num_skipped: int = 40) -> float:
        """Of rollouts that were stored on the host that wrote them, but for the first groups."""
        units = num_storage_units(self.config)
        num_home = num_all = 0
        for group in self.groups[num_skipped:]:
            for row_id, rollout in group.rollouts.items():
                unit_host = row_id % units % self.config.cluster.size
                num_home += unit_host == host_of(self, rollout.replica)
                num_all += 1
        return num_home / num_all

    def watch(self, replica: Any) -> None:
        """Count what it writes, also of rollouts that others go on with."""
        put = replica._put

        def count(item: RequestOutput) -> None:
            row_id, total = item.request.row_id, len(item.written.ids)
            self.written[replica.index] += total - self.so_far.get(row_id, 0)
            self.so_far[row_id] = total
            put(item)

        replica._put = count

    def loads(self) -> list[int]:
        """Tokens that each replica wrote."""
        return [self.written[replica] for replica in range(self.num_replicas)]


def played(folder: Path, **changes: Any) -> tuple[PlacedLoop, float]:
    """A run on two hosts, and how long it took."""
    loop = PlacedLoop(
        num_hosts=2,
        num_replicas=4,
        groups_per_step=16,
        rollouts_per_prompt=4,
        num_steps=20,
        max_num_seqs=16,
        **changes,
    )
    run(loop.run(folder))
    return loop, loop.end_s


def host_of(loop: Loop, replica: int) -> int:
    return assign(loop.config)[f"generator-{replica}"][0].host


@pytest.mark.full
@pytest.mark.parametrize("segment_tokens", [16, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("drop_share", [0.3, pytest.param(0.0, marks=pytest.mark.long)])
def test_rollouts_are_stored_where_they_are_written_and_no_replica_has_more_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_tokens: int, drop_share: float
) -> None:
    changes = {"segment_tokens": segment_tokens, "drop_share": drop_share}
    near, near_s = played(tmp_path / "near", **changes)
    monkeypatch.setattr("llamarl.controller.wiring.units_near", lambda config: {})
    far, far_s = played(tmp_path / "far", **changes)
    assert {host_of(near, replica) for replica in range(4)} == {0, 1}
    assert near.share_at_home() >= 0.9
    assert far.share_at_home() < 0.7  # else why
    assert near_s <= 1.02 * far_s
    assert max(near.loads()) <= 1.15 * max(far.loads())  # lengths differ by a factor of 160
    assert max(near.staleness()) <= 1


@pytest.mark.parametrize("fault", [Faults(dies_at_s=2.0), slower(decode_step_s=0.03)])
def test_a_host_whose_replicas_are_lost_or_slow_holds_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Faults
) -> None:
    hosts = units_near(PlacedLoop(num_hosts=2, num_replicas=4).config)
    faults = {f"generator-{replica}": fault for replica, units in hosts.items() if units == [1]}
    assert 0 < len(faults) < 4
    near, near_s = played(tmp_path / "near", faults=faults)
    monkeypatch.setattr("llamarl.controller.wiring.units_near", lambda config: {})
    _, far_s = played(tmp_path / "far", faults=faults)
    assert near.trainer.version == 20
    assert max(near.staleness()) <= 1
    assert near_s <= 1.05 * far_s


def test_on_one_host_row_ids_follow_one_another_whatever_the_number_of_units() -> None:
    loop = Loop(num_replicas=3)
    assert units_near(loop.config) == {}
    dispatch = make_dispatch(loop.config, loop.executors)
    assert dispatch.balance.plan_units(3) == [None, None, None]
    assert dispatch.balance.unit_near(1) is None


def test_each_replica_has_storage_units_of_its_host_near() -> None:
    loop = Loop(num_hosts=2, num_replicas=4)
    dispatch = make_dispatch(loop.config, loop.executors)
    near = {replica: [dispatch.balance.unit_near(replica)] for replica in range(4)}
    assert near == units_near(loop.config)
