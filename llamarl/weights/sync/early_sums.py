"""Fingerprints of what has arrived, taken while the rest is still on its way.

Owns: the thread that takes them, for one bucket. Does not own: which parameters have arrived
(`transports/`) or the sums themselves (`integrity/fingerprint.py`). Invariant: a sum is taken after
all of its parameter lies in the staging memory, and nothing is read there once `finish` or `stop`
has returned.
"""

import queue
import threading
from collections.abc import Callable, Iterable

from llamarl.weights.integrity.comparison import Fingerprints


class EarlySums:
    """`take(name)` gives the fingerprint of a parameter; it runs on a thread of its own for each
    name that `add` gets, from whichever thread."""

    def __init__(self, take: Callable[[str], int]) -> None:
        self._take = take
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._found: dict[str, int] = {}
        self._error: Exception | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="sum-weights", daemon=True)
        self._thread.start()

    def add(self, name: str) -> None:
        """All of this parameter has arrived."""
        self._names.put(name)

    def finish(self, names: Iterable[str]) -> Fingerprints:
        """Those of `names`, all of which have arrived; what `take` raised. RuntimeError after
        `stop`."""
        self._names.put(None)
        self._thread.join()
        if self._is_stopped:
            raise RuntimeError("the version was given up while its sums were taken")
        if self._error is not None:
            raise self._error
        return Fingerprints(
            (name, self._found[name] if name in self._found else self._take(name)) for name in names
        )

    def stop(self) -> None:
        """Forget them."""
        self._is_stopped = True
        self._names.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (name := self._names.get()) is not None and not self._is_stopped:
                self._found[name] = self._take(name)
        except Exception as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error
