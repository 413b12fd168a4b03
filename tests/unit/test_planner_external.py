"""The law of the forecasts against public measurements."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import replace

import pytest

from llamarl.core.device.hardware import GPUS
from llamarl.planner.efficiency import CONFIRMED, LAW, SPREADS
from tests.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from harness import read
from planner_bench import external

ROWS = external.read_measurements()
PAGE = ROOT / "docs" / "benchmarks" / "planner_external.json"
QUICK = ("8 H100", "8 B200", "1 A6000", "128/2048", "one sequence")


def page_ratios() -> dict[str, float]:
    """By row, as the page has them."""
    found = {case: values["ratio"] for case, values in read(PAGE).items() if "ratio" in values}
    return {case.removesuffix(" (fit)").removesuffix(" (partial)"): r for case, r in found.items()}


def test_the_page_has_every_row_and_the_bands_are_its_quantiles() -> None:
    ratios = page_ratios()
    assert ratios.keys() == {each.name for each in ROWS}
    rows = external.counted(ROWS)
    for kind, spread in SPREADS.items():
        assert external.spread_of(external.on_confirmed(rows[kind], ratios)) == spread, kind
    for kind, cards in CONFIRMED.items():
        assert external.confirmed(rows[kind], ratios) == [*cards], kind


def test_whole_steps_count_although_they_are_partial_and_other_partial_rows_do_not() -> None:
    rows = external.counted(ROWS)
    assert len(rows["step"]) == 4 == sum(each.is_partial for each in rows["step"])
    others = [each for each in ROWS if each.is_partial and each.only != "recipe"]
    assert others
    assert not any(each.is_partial for kind in ("trainer", "generator") for each in rows[kind])


def test_the_pages_say_what_the_table_says() -> None:
    ratios, planning = page_ratios(), (ROOT / "docs" / "planning.md").read_text()
    for spread in SPREADS.values():
        half, most = (f"{low:g} to {high:g}" for low, high in (spread.half, spread.most))
        cells = f"| {spread.num_rows} | {half if spread.half != spread.most else ''} | {most} |"
        assert cells.replace("|  |", "| |") in planning
    fitted = max(external.error(ratios[each.name]) for each in ROWS if each.is_fit)
    assert f"of the fitted rows, max(ratio, 1 / ratio) - 1, is {fitted:.2f}." in planning
    rows = external.counted(ROWS)["generator"]
    there = external.spread_of([ratios[each.name] for each in rows if each.gpu == "H20-96GB"])
    low, high = there.half
    assert f"H20-96GB, which take {low:g} to {high:g} times" in planning
    assert f"in the middle half of {there.num_rows} rows" in planning


def test_the_first_run_on_a_gpu_expects_what_its_recipe_forecasts() -> None:
    recipe = (ROOT / "recipes" / "gsm8k_llama32_1b_1gpu" / "README.md").read_text()
    (step_s,) = re.findall(r"as planned: .*?  +([\d.]+) ", recipe)
    (band,) = re.findall(r"a step as planned takes ([\d.]+ to [\d.]+) s", recipe)
    first = (ROOT / "docs" / "first-gpu-run.md").read_text()
    assert f"forecasts {step_s} seconds a step" in first
    assert f"200 steps take {200 * float(step_s) / 60:.0f} minutes" in first
    assert f"it may be {band} seconds" in first


@pytest.mark.long
def test_forecasts_of_public_measurements_are_those_of_the_page() -> None:
    rows = [each for each in ROWS if any(quick in each.name for quick in QUICK)]
    compare_with_page([each for each in rows if each.only != "recipe"])


@pytest.mark.slow
def test_every_forecast_of_a_public_measurement_is_that_of_the_page() -> None:
    compare_with_page(ROWS)


def compare_with_page(rows: list[external.Measurement]) -> None:
    known = page_ratios()
    for name, ratio in external.compare(rows).items():
        assert ratio == pytest.approx(known[name], rel=0.01), name
    fitted = (external.error(known[each.name]) for each in ROWS if each.is_fit)
    assert max(fitted) <= external.GOAL_FIT


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
