"""Rows that a replica has reported, until the dispatcher has got them.

Owns: the rows, and their numbers in the order in which they stopped. Does not own: how they stop,
or who asks. Invariant: a row is kept until a question says that it arrived, so an answer that is
lost on its way, with the collector that asked or without, costs nothing.
"""

import time
from collections.abc import Iterable

from llamarl.protocols import Report
from llamarl.types import RolloutInfo


class KeptRows:
    """Numbers begin with the time, so that those of a later process or session are higher."""

    def __init__(self) -> None:
        self._first = time.time_ns()
        self._rows: list[RolloutInfo] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[RolloutInfo]) -> None:
        """These stopped, after all others."""
        self._rows += rows

    def forget(self, received: int) -> None:
        """The rows below this number have arrived."""
        num_rows = max(0, received - self._first)
        del self._rows[:num_rows]
        self._first += num_rows

    def report(self) -> Report:
        """All that is kept."""
        return self._first, [*self._rows]
