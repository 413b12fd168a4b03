"""The set-up says how far pip is in a few lines, and why it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from install import stages

PIP = """\
Looking in indexes: https://pypi.org/simple
WARNING: Location 'x' is ignored: it is either a non-existing path or lacks a specific scheme.
Collecting torch==2.13.0 (from -r requirements.txt (line 2))
  Downloading torch-2.13.0.whl (180 MB)
Collecting typing_extensions>=4 (from torch==2.13.0)
WARNING: Ignoring version 1.0 of x
Installing collected packages: typing_extensions, torch
"""


def test_each_stage_is_one_line_with_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "pip-23.dist-info").mkdir()
    lines: list[str | None] = [*PIP.splitlines(keepends=True), None]
    found = []
    for stage in stages(lines, 2, tmp_path):
        found.append(stage)
        if stage[1] and stage[0].startswith("installing"):
            (tmp_path / "torch-2.13.0.dist-info").mkdir()
    assert found == [
        ("finding and downloading 2 packages: 1, torch", False),
        ("finding and downloading 2 packages: 2, typing_extensions", False),
        ("WARNING: Ignoring version 1.0 of x", True),
        ("installing 2 packages", True),
        ("installing 2 packages: 1 done", False),
    ]


def test_what_cannot_be_installed_ends_with_pips_own_words() -> None:
    install = Path(__file__).resolve().parents[2] / "tools" / "install.py"
    done = subprocess.run(
        [sys.executable, str(install), "--no-index", "--no-deps", "surely-not-there==1.0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "No matching distribution found for surely-not-there==1.0" in done.stderr
    assert "ERROR" in done.stdout
