"""Files with a JSON value per line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, values: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
