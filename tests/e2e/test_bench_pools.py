"""The comparison of kinds of GPU, at its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_comparison_of_kinds_of_gpu_writes_what_each_cluster_costs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    tool = str(ROOT / "tools" / "bench_pools.py")
    command = [sys.executable, tool, "--quick", f"--json={file}"]
    command += ["--models", "72B", "--groups", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(file.read_text())["72B 10k, 64 groups"]
    mixed, same = found["mixed"], found["same"]
    assert mixed["generators"] == 32, "all H20 that there are"
    assert mixed["trainer"] == same["trainer"]
    assert found["gain"] == pytest.approx(mixed["per_cost"] / same["per_cost"])
    price = mixed["trainer"] * 2.85 + 32
    tokens = mixed["per_cost"] * price / 3600 * mixed["step_s"]
    equal = same["per_cost"] * 2.85 * (same["trainer"] + same["generators"]) / 3600 * same["step_s"]
    assert tokens == pytest.approx(equal, rel=0.1), "both train the same rollouts"
