"""The environment of `make rivals`: other systems, run by benchmarks in processes of their own."""

from __future__ import annotations

import os

from harness import ROOT

FOLDER = ROOT / ".venv-rivals"
PYTHON = FOLDER / "bin" / "python"


def why_not(package: str) -> str | None:
    """Why the rival whose Python package this is cannot be measured here, if so."""
    is_there = any(FOLDER.glob(f"lib/python*/site-packages/{package}"))
    return None if is_there else f"{package} is not installed: make rivals"


def environment(num_threads: int = 1) -> dict[str, str]:
    """For a child that imports from tools/; nothing is downloaded."""
    own = {"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": str(num_threads)}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **quiet}
