"""Exits with 0 if the file that the agent left holds the answer, else with 1."""

import sys
from pathlib import Path

answer = Path("answer.txt")
sys.exit(not (answer.is_file() and answer.read_text() == sys.argv[1]))
