"""Why a generator does not decode, and since when; the clock is the caller's."""

from collections.abc import Callable
from typing import Generic, TypeVar

Time = TypeVar("Time", int, float)


class Standstill(Generic[Time]):
    """`away` are the memory tags that are off the device; `is_mixed` says that some buckets of a
    version are committed and others not. `record` gets each wait that ended: (reason, start, end).
    """

    def __init__(self, now: Callable[[], Time], record: Callable[[str, Time, Time], None]) -> None:
        self.away: set[str] = set()
        self.is_mixed = False
        self._now: Callable[[], Time] = now
        self._record: Callable[[str, Time, Time], None] = record
        self._waiting: tuple[str, Time] | None = None

    @property
    def reason(self) -> str:
        """What decoding waits for: "phase" or "buckets" and, if neither, at most "requests"."""
        return "phase" if self.away else "buckets" if self.is_mixed else "requests"

    def begin(self) -> None:
        """Wait for `reason` from now on, if not already."""
        if self._waiting is None or self._waiting[0] != self.reason:
            self.end()
            self._waiting = self.reason, self._now()

    def end(self) -> None:
        """Record what was waited for until now."""
        if self._waiting is not None:
            self._record(*self._waiting, self._now())
            self._waiting = None
