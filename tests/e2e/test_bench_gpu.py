"""The GPU benchmark, on a CPU and with tiny sizes: it must run when there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_section_of_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_gpu.py"), "--device=cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--json=figures.json"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "figures.json").read_text())
    assert results.pop("gpu") == "none"
    sections = {name: result for name, result in results.items() if isinstance(result, dict)}
    errors = {name: result["error"] for name, result in sections.items() if result["error"]}
    assert errors == {"memory": "ValueError: memory is measured on CUDA only"}
    for name in sections.keys() - errors.keys():
        assert all(value >= 0 for value in sections[name]["figures"].values()), name
    assert sections["publish"]["figures"]["copied_bytes"] > 0
