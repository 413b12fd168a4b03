"""A whole run with replicas at a second site, behind a link of 200 Mbit/s and 30 ms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import ROOT, read
from links import why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"namespaces of Linux: {WHY_NOT}"),
]

LIMIT_S = 500.0


def test_a_run_at_two_sites_learns_as_ever_and_a_break_of_ten_seconds_loses_nothing(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_sites.py"), "--break-s=10"]
    done = subprocess.run(
        [*command, f"--json={tmp_path / 'sites.json'}", f"--run-dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path / "sites.json")[""]
    assert found["accuracy_after"] >= 0.9
    assert found["models_per_publish"] <= 1.05
    assert found["far_rollouts"] > 1000
    # The break met a publish, which went on.
    assert found["break_s"] >= 10
    assert found["longest_far_publish_s"] >= 5
    assert (found["num_lost"], found["rollouts_trained"]) == (0, 30 * 64 * 8)
    assert found["staleness_max"] <= 1
    # Neither decoding nor the trainer stood still for a version on its way.
    assert max(found["standstill_s"]) < 0.1 < found["far_publish_s"]
    assert found["trainer_wait_s"] < 0.1
    log = (tmp_path / "run" / "logs" / "generator-1.log").read_text()
    assert "Traceback" not in log
