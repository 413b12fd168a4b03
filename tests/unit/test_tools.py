"""The benchmarks: their pure parts, and that those of weights and offloading run to their end."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.metrics.span import Span
from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.layout.reshard import num_bytes, plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from weights_bench.decoding import longest_gap_s, tokens_per_s
from weights_bench.model import Model, generator_layouts, llama, trainer_layouts

MS = 10**6


def step(start_ms, end_ms, tokens=64):
    return Span(0, "decode", "busy", start_ms * MS, end_ms * MS, {"tokens": tokens})


STEPS = [step(0, 10), step(11, 20), step(26, 36), step(37, 47), step(67, 77)]


def test_the_longest_gap_is_one_between_steps_that_the_window_touches() -> None:
    assert longest_gap_s(STEPS, 0, 46 * MS) == pytest.approx(0.006)
    assert longest_gap_s(STEPS, 22 * MS, 23 * MS) == pytest.approx(0.006)  # nothing but the gap
    assert longest_gap_s(STEPS, 28 * MS, 50 * MS) == pytest.approx(0.020)
    assert math.isnan(longest_gap_s(STEPS, 80 * MS, 90 * MS))


def test_a_step_that_the_window_cuts_counts_in_part() -> None:
    assert tokens_per_s(STEPS, 0, 20 * MS) == pytest.approx(128 / 0.020)
    assert tokens_per_s(STEPS, 5 * MS, 31 * MS) == pytest.approx((32 + 64 + 32) / 0.026)
    assert tokens_per_s(STEPS, 50 * MS, 60 * MS) == 0


def test_the_benchmark_model_is_planned_whole_with_norms_on_both_ranks() -> None:
    model = Model(llama(1, vocab_size=96, hidden_size=64, intermediate_size=160), "bfloat16")
    source, target = [], []
    for rank in range(2):
        for layouts, side in (
            (trainer_layouts(model, rank), source),
            (generator_layouts(model, rank)[0], target),
        ):
            names = (tuple(layouts),)
            side.append(RankLayout(rank=rank, host="here", parameters=layouts, buckets=names))
    copies = plan(source, target)
    assert num_bytes(copies) == model.num_bytes + 3 * 64 * 2  # three norms more
    assert {copy.source_rank for copy in copies} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_weights.py", "bench_offload.py", "bench_checkpoints.py"])
def test_a_benchmark_of_small_weights_runs_to_its_end(name: str, tmp_path: Path) -> None:
    program = Path(__file__).resolve().parents[2] / "tools" / name
    command = [sys.executable, str(program), "--megabytes=4", "--repeats=1", "--json=figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    values = [value for value in figures.values() if isinstance(value, float)]
    assert values
    assert min(values) > 0
