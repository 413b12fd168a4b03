"""A whole run whose replicas differ: a float32 pool and one in int8 with fewer slots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.metrics.span import SpanReader
from tests.json_lines import read_lines
from tests.places import ROOT

pytestmark = pytest.mark.slow
LIMIT_S = 500.0


def test_a_run_of_two_precisions_learns_from_what_both_pools_write(
    tmp_path: Path,
) -> None:
    pools = "['max_num_seqs=128','quantization=int8 max_num_seqs=32']"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "llamarl", "train"),
            f"--config-dir={ROOT / 'recipes' / 'quickstart'}",
            f"run_dir={tmp_path}",
            f"generator.pools={pools}",
            *("num_steps=12", "metrics.live=false", "checkpoint.export=false"),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert summary["staleness_max"] <= 1
    for replica in (0, 1):
        spans = SpanReader(tmp_path / "spans" / f"generator-{replica}.jsonl").read()
        num_rows = sum(span.args["rows"] for span in spans if span.name == "put")
        assert num_rows > 0.1 * summary["rollouts_trained"], f"pool {replica} wrote {num_rows}"
    records = read_lines(tmp_path / "metrics.jsonl")
    tolerances = [r["logprob_check/tolerance"] for r in records if "logprob_check/tolerance" in r]
    assert tolerances[-1] > 1e-3, "int8 has a tolerance of its own"
