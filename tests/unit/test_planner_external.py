"""The law of the forecasts against public measurements."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace

import pytest

from llamarl.planner.efficiency import ERRORS, LAW
from llamarl.planner.hardware import GPUS
from tests.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from planner_bench import external

ROWS = external.read_measurements()
QUICK = ("128/2048", "128/4096", "1000/2000", "2048/2048", "one sequence")


def check(rows: list[external.Measurement]) -> dict[str, float]:
    ratios = external.compare(rows)
    found = external.largest_errors(rows, ratios)
    worst = sorted(ratios.items(), key=lambda item: -external.error(item[1]))[:5]
    assert found["fit"] <= external.GOAL_FIT, worst
    assert found["held_out"] <= external.GOAL_HELD_OUT, worst
    return found


@pytest.mark.long
def test_public_measurements_confirm_the_forecasts_and_their_bands() -> None:
    rows = [
        each
        for each in ROWS
        if each.only == "trainer" or any(quick in each.name for quick in QUICK)
    ]
    found = check(rows)
    for kind, error in ERRORS.items():
        assert error - 0.02 < found[kind] <= error, (kind, found[kind])


@pytest.mark.slow
def test_every_public_measurement_confirms_the_forecasts() -> None:
    check([each for each in ROWS if not each.is_partial])


def test_three_rows_are_fitted_each_has_a_source_and_no_name_occurs_twice() -> None:
    assert sum(each.is_fit for each in ROWS) == 3
    assert len({each.name for each in ROWS}) == len(ROWS)
    assert all(len(each.source) > 20 and each.measured > 0 for each in ROWS)
    assert not any(each.is_fit and each.is_partial for each in ROWS)


def test_every_efficiency_is_a_share() -> None:
    shares = dataclasses.asdict(LAW)
    for name, card in GPUS.items():
        shares[f"{name} gemm"] = card.gemm
        shares |= {f"{name} {kernel}": share for kernel, share in card.attention.items()}
    assert all(0 < share <= 1 for share in shares.values()), shares


def test_twice_too_fast_and_twice_too_slow_are_the_same_error() -> None:
    assert external.error(2.0) == external.error(0.5) == 1.0
    row = next(each for each in ROWS if each.unit == "s per step" and each.only == "trainer")
    speed = next(each for each in ROWS if each.unit == "output tokens/s")
    for each, slower in ((row, 2 * row.measured), (speed, speed.measured / 2)):
        assert replace(each, measured=slower).ratio() == pytest.approx(2 * each.ratio())
