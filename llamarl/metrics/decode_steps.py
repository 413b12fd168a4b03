"""How long the decode steps of a running run took, by how many rollouts were in them.

Owns: which span files are read for it. Does not own: the format (`span_file.py`) or the fit
(`lengths/latency.py`). Invariant: each span is read once.
"""

from pathlib import Path

from llamarl.metrics.aggregate import DECODE, executor_of
from llamarl.metrics.span_file import SpanReader, span_files

MAX_FILES = 4  # read: replicas are alike


class DecodeSteps:
    """The new decode steps of some generators, from the span files in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._readers: list[SpanReader] = []

    def read(self) -> list[tuple[int, float]]:
        """(rollouts in the step, seconds) of those that ended since the last call."""
        if len(self._readers) < MAX_FILES:
            known = {reader.path for reader in self._readers}
            new = [path for path in span_files(self._folder) if path not in known]
            new = [path for path in new if executor_of(path.stem) == "generator"]
            self._readers += map(SpanReader, new[: MAX_FILES - len(known)])
        return [
            (span.args["tokens"], (span.end_ns - span.start_ns) / 1e9)
            for reader in self._readers
            for span in reader.read()
            if (span.cat, span.name) == DECODE and not span.is_sum and "tokens" in span.args
        ]
