"""The benchmark of streaming runs, at its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_of_streams_runs_every_mode_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_streams.py"),
        "--quick",
        f"--json={file}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["tail"]
    assert len(found["step_s"]) == 24
    assert 0 < found["share_of_least"] < 1.5, "no run is much faster than its work allows"
    assert found["least_vs_sync"] == pytest.approx(found["async_vs_sync"] / found["share_of_least"])
    assert len(found["duels"]) == 2
    assert 0 <= found["carried_masked_share"] < 1
    assert found["ranked_vs_fifo"].keys() == found["share_of_oracle"].keys()
