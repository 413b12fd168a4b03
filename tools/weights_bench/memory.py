"""How much memory processes have, seen from outside."""

from __future__ import annotations

from pathlib import Path


def private_bytes(pid: int) -> int:
    """Memory that is no file's and that no other process shares."""
    return _bytes(Path(f"/proc/{pid}/status"), ("RssAnon:",))


def _bytes(path: Path, fields: tuple[str, ...]) -> int:
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith(fields)]
    return sum(int(words[1]) for words in lines) * 1024
