"""What went along the edges of a run's dataflow, measured.

Owns: rows, bytes and waiting by executor, from the spans of a run. Does not own: the spans, or how
they are shown (`dataflow.py`). Invariant: nothing is estimated: what spans do not hold is missing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.config.check import require
from llamarl.experience.columns import DERIVED
from llamarl.metrics.shares import by_executor, read_timeline
from llamarl.metrics.span import Span, executor_of

NS_PER_S = 1e9


@dataclass(slots=True)
class Exchange:
    """What one executor read from storage and wrote there, all its processes together."""

    rows: Counter[str] = field(default_factory=Counter)  # by "get" and "put"
    num_bytes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By "get" and "put", then by column."""


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Of one run: `seconds` from its first to its last exchange with storage; per executor the
    share of the steps in which it waited, and its exchanged."""

    seconds: float
    waits: Mapping[str, float]
    exchanged: Mapping[str, Exchange]

    def rows_per_s(self, executor: str, way: str) -> float:
        """Rows that the executor got ("get") or wrote ("put"), per second."""
        return self._of(executor).rows[way] / self.seconds

    def bytes_per_s(self, executor: str, columns: tuple[str, ...]) -> float:
        """Bytes of these columns, or of those they are made from, that the executor got."""
        found = self._of(executor).num_bytes["get"]
        return sum(found[DERIVED.get(name, name)] for name in columns) / self.seconds

    def _of(self, executor: str) -> Exchange:
        return self.exchanged.get(executor, Exchange())


def read_flows(run_dir: str) -> Flows:
    """Read the spans in a run's folder. ValueError if they hold no exchange with storage."""
    exchanged: dict[str, Exchange] = defaultdict(Exchange)
    times_ns: list[int] = []

    def note(process: str, span: Span) -> None:
        sizes = span.args.get("bytes")
        if span.cat != "mark" or span.name not in ("get", "put") or not isinstance(sizes, dict):
            return
        of_executor = exchanged[executor_of(process)]
        of_executor.rows[span.name] += span.args.get("rows", 0)
        of_executor.num_bytes[span.name].update(sizes)
        times_ns[:] = (
            [min(times_ns[0], span.start_ns), max(times_ns[1], span.end_ns)]
            if times_ns
            else [span.start_ns, span.end_ns]
        )

    timeline = read_timeline(Path(run_dir, "spans"), note)
    require(bool(times_ns), "--run", "name the folder of a run of this recipe", run_dir)
    shares = by_executor(timeline.shares())
    return Flows(
        seconds=max(1, times_ns[1] - times_ns[0]) / NS_PER_S,
        waits={name: sum(share.waits.values()) for name, share in shares.items()},
        exchanged=exchanged,
    )
