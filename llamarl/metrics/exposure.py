"""What publishes cost a running run: who stood still for them, and how long.

Owns: the three kinds of standstill, and their seconds per publish. Does not own: reading spans
(`recent_spans.py`). Invariant: a wait counts once, with the publish during which it was; what a
process does meanwhile is not exposed, however long the publish takes.
"""

from collections import defaultdict

import numpy as np

from llamarl.metrics.aggregate import executor_of
from llamarl.metrics.intervals import intersect, length, union
from llamarl.metrics.span_file import Span

Times = list[tuple[int, int]]


class Exposure:
    """Sums up spans as they are read.

    `trainer_s`: the trainer kept its weights for a write, or the controller the next batch for the
    publish before. `commit_s`: a replica did not decode because it committed, or between the
    buckets of a version. `starved_s`: a replica had nothing to decode while a version was on its
    way; rollouts that wait for it are all it has then. The last two are means over the replicas.
    """

    def __init__(self) -> None:
        self._processes: dict[str, set[str]] = defaultdict(set)  # by executor
        self._publishes: Times = []
        self._has_begun = False
        self._idle: dict[str, Times] = defaultdict(list)  # of generators, by process
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, process: str, span: Span) -> None:
        """A span that has ended."""
        executor, times = executor_of(process), (span.start_ns, span.end_ns)
        self._processes[executor].add(process)
        if executor == "controller" and (span.cat, span.name) == ("publish", "publish"):
            if "replica" not in span.args:  # else of one replica
                self._publishes += [times] if self._has_begun else []
                self._has_begun = True
        elif executor == "generator":
            self._idle[process] += [times] if (span.cat, span.name) == ("wait", "requests") else []
            if span.name == "commit" or (span.cat, span.name) == ("wait", "buckets"):
                self._seconds["commit_s"][process] += (times[1] - times[0]) / 1e9
        if span.cat == "wait" and span.name in ("publish", "last_publish"):
            self._seconds["trainer_s"][process] += (times[1] - times[0]) / 1e9

    def take(self) -> dict[str, float]:
        """Seconds per publish by kind, and `exposed_s`, their sum, since the last call; nothing
        before two publishes have ended: what was waited for during the newest may be unread. A
        run's first publish does not count, for nothing goes on beside it."""
        *done, newest = self._publishes or [(0, 0)]
        if not done:
            return {}
        during = union(np.array(done, dtype=np.int64))
        for process, idle in self._idle.items():
            waited = intersect(union(np.array(idle, dtype=np.int64).reshape(-1, 2)), during)
            self._seconds["starved_s"][process] += length(waited) / 1e9
            self._idle[process] = [times for times in idle if times[1] > newest[0]]
        found = {
            name: self._mean_s(self._seconds[name]) / len(done)
            for name in ("trainer_s", "commit_s", "starved_s")
        }
        self._publishes = [newest]
        self._seconds.clear()
        return found | {"exposed_s": sum(found.values())}

    def _mean_s(self, seconds: dict[str, float]) -> float:
        """Summed over executors, the mean over the processes of each."""
        return sum(
            each_s / len(self._processes[executor_of(process)])
            for process, each_s in seconds.items()
        )
