"""The GPU benchmark with tiny sizes, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench_gpu.py"


def test_every_section_that_needs_no_tokenizer_runs(tmp_path: Path) -> None:
    sections = ["generation", "training", "memory", "publish", "offload"]
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--json=figures.json", "--only", *sections],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = read(tmp_path / "figures.json")
    assert {name: found[name]["error"] for name in sections} == dict.fromkeys(sections, ""), (
        done.stderr
    )
