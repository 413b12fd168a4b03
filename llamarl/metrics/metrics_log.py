"""metrics.jsonl, and passing a run's numbers to its trackers.

Owns: the file's format. Does not own: which numbers (`step_metrics.py`) or the trackers
(`trackers.py`). Invariant: when `log` returns, its values are in the file on disk.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from llamarl.json_file import parse
from llamarl.metrics.step_metrics import Histograms, Scalars, Texts
from llamarl.metrics.trackers import Tracker

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl` and passes the same to `trackers` (by name).

    Each line is {"step": int, "unix_s": float, <tag>: float, ...} plus "histograms" and "texts"
    where there are any; NaN and infinities are null. A step may have several lines (training,
    evaluation) and after a resume repeats: the last value of a tag counts, see `read_metrics`.
    A tracker that fails gets nothing more; the run continues.
    """

    def __init__(self, run_dir: str | Path, trackers: Mapping[str, Tracker] | None = None) -> None:
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.exists() and not _ends_a_line(path)
        self._jsonl = path.open("a")
        if unfinished:
            self._jsonl.write("\n")
        self._trackers = dict(trackers or {})

    def log(
        self,
        step: int,
        scalars: Scalars,
        histograms: Histograms | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Write the values of `step` (optimizer steps completed)."""
        line: dict[str, Any] = {"step": step, "unix_s": time.time()}
        line |= {tag: _finite(value) for tag, value in scalars.items()}
        if histograms:
            line["histograms"] = histograms
        if texts:
            line["texts"] = texts
        self._jsonl.write(json.dumps(line, default=str) + "\n")
        self._jsonl.flush()
        self._each(lambda tracker: tracker.log(step, scalars, histograms or {}, texts or {}))

    def close(self) -> None:
        """Close the file and the trackers."""
        self._jsonl.close()
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - another program's failure, not the run's
                del self._trackers[name]
                logging.warning("tracker %s failed and gets nothing more: %s", name, error)


def read_metrics(
    path: str | Path, tags: Collection[str] | None = None
) -> dict[int, dict[str, Any]]:
    """Step -> merged line of a metrics.jsonl, later lines winning; unfinished and damaged ones are
    skipped. With `tags`, only these are kept of each line, so that its texts take no memory."""
    steps: dict[int, dict[str, Any]] = {}
    with Path(path).open("rb") as file:
        for text in file:
            try:
                line = parse(text)
            except ValueError:
                continue
            if isinstance(line, dict) and type(step := line.get("step")) is int:
                if tags is not None:
                    line = {tag: line[tag] for tag in tags if tag in line}
                steps.setdefault(step, {}).update(line)
    return dict(sorted(steps.items()))


def _ends_a_line(path: Path) -> bool:
    """True if the file is empty or its last byte ends a line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
