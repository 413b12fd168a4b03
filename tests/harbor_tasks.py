"""Task folders as Harbor has them, written by tests."""

from __future__ import annotations

from pathlib import Path

TOML = """version = "1.0"

[metadata]
author_name = "A. Author"
difficulty = "easy"
tags = ["files"]

[verifier]
timeout_sec = 20.0
env = { MODE = "strict" }

[agent]
timeout_sec = 25.0

[environment]
build_timeout_sec = 600.0
cpus = 2
memory = "1G"
storage_mb = 300
allow_internet = false
env = { COLOUR = "red" }
"""
DOCKERFILE = """FROM ubuntu:24.04

# No RUN here.
WORKDIR /app
COPY data.txt \\
    more/ ./in/
"""
TEST = """#!/bin/bash
echo 1 > /logs/verifier/reward.txt
"""
INSTRUCTION = """<!-- harbor-canary GUID 7 -->
# a canary too

Write the answer into /app/answer.txt.
"""


def write_task(
    folder: Path,
    *,
    toml: str = TOML,
    dockerfile: str | None = DOCKERFILE,
    test: str | None = TEST,
    instruction: str | None = INSTRUCTION,
) -> Path:
    """Write a task with these files; None leaves one out."""
    texts = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "environment/data.txt": "data\n",
        "environment/more/deep/list.txt": "list\n",
        "tests/test.sh": test,
        "tests/data/expected.txt": "expected\n",
        "solution/solve.sh": "#!/bin/bash\n",
    }
    for name, text in texts.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder
