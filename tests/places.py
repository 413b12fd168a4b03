"""Where the repository's files stand."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart"
CHECKPOINT = RECIPE / "checkpoint"
TOOLS_RECIPE = ROOT / "recipes" / "quickstart_tools"
