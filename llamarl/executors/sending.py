"""When a publish may read the weights of a trainer rank.

Owns: the version that is there to be read, and who reads it now. Does not own: the bytes
(`weights/writer.py`). Invariant: the weights are never changed, nor away, while a write reads them.
"""

from __future__ import annotations

import threading

from llamarl.weights.errors import StaleVersion
from llamarl.weights.layout import Offer, RankLayout, Route
from llamarl.weights.writer import Writer


class Sending:
    """Writes of one rank's weights, from any thread, between `present` and `begin_step`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._version: int | None = None
        self._num_reading = 0
        self._changed = threading.Condition()

    def layout(self) -> RankLayout:
        """Where this rank keeps its boxes."""
        return self._writer.layout()

    def connect(self, replica: int, route: Route | None) -> None:
        """Keep the copies of `route` that start here; None forgets the replica."""
        self._writer.connect(replica, route)

    def begin_step(self) -> None:
        """The weights are about to change or to leave; waits for the writes that read them."""
        with self._changed:
            self._version = None
            self._changed.wait_for(lambda: self._num_reading == 0)

    def present(self, version: int) -> None:
        """The weights are there, as `version`."""
        with self._changed:
            self._version = version

    def write(self, version: int, offers: list[Offer]) -> dict[str, int]:
        """Write this rank's slices into the offered memory. StaleVersion if they are not there."""
        with self._changed:
            if version != self._version:
                raise StaleVersion(f"the trainer holds version {self._version}, asked: {version}")
            self._num_reading += 1
        try:
            return self._writer.write(version, offers)
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Drop all mappings."""
        self._writer.close()
