"""The benchmark of the store, small and without its rival: each row must arrive once and whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_of_the_store_moves_every_row_once(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    command = [sys.executable, str(ROOT / "tools" / "bench_store.py"), "--quick", f"--json={file}"]
    command += ["--tokens", "16", "512", "--units", "1", "2", "--consumers", "1", "2", "--rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["rows_vs_transferqueue"] is None
    assert found["bytes_vs_memcpy"] > 0
    assert found["second_unit"] > 0
    cases = {
        (each["units"], each["work"]["consumers"], each["work"]["tokens"])
        for each in found["results"]
    }
    assert len(cases) == 8
