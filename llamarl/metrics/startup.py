"""Which executors are ready during the start of a run, and what the others do.

Owns: the state of every executor that is being started, in words. Does not own: starting them
(`build.py`) or the display (`console.py`). Invariant: one row per role, for two replicas as for
thousands.
"""

import time
from collections.abc import Callable

from llamarl.metrics.aggregate import executor_of

STATES = ("starting", "loading", "ready")
MAX_NAMES = 3  # of a role's executors in one state; of more than these only the number is shown

ReportState = Callable[[str, str], None]
"""Called with an executor's name and its new state, one of STATES."""


class Startup:
    """The executors of one start."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, float]] = {}  # name -> (state, since when)
        self._started_s = time.monotonic()

    def mark(self, name: str, state: str) -> None:
        """Executor `name` has reached `state`."""
        self._states[name] = (state, time.monotonic())

    def rows(self) -> list[tuple[str, str]]:
        """(role, what its executors do), such as ("generator", "1 of 2 ready; generator-1 loading
        (4 s)")."""
        roles: dict[str, list[str]] = {}
        for name in list(self._states):
            roles.setdefault(executor_of(name), []).append(name)
        return [(role, self._describe(names)) for role, names in roles.items()]

    def is_complete(self, name: str) -> bool:
        """True if every executor of the role of `name` is ready."""
        role = executor_of(name)
        return all(s == "ready" for n, (s, _) in self._states.items() if executor_of(n) == role)

    def _describe(self, names: list[str]) -> str:
        now_s = time.monotonic()
        by_state = {s: [n for n in names if self._states[n][0] == s] for s in STATES}
        ready = by_state.pop("ready")
        if len(ready) == len(names):
            last_s = max(self._states[name][1] for name in names)
            return f"ready after {last_s - self._started_s:.0f} s"
        parts = [f"{len(ready)} of {len(names)} ready"] if len(names) > 1 else []
        for state, members in by_state.items():
            if members:
                waited_s = now_s - min(self._states[name][1] for name in members)
                named = ", ".join(members) if len(members) <= MAX_NAMES else f"{len(members)}"
                named = f"{named} " if len(names) > 1 else ""
                parts.append(f"{named}{state} ({waited_s:.0f} s)")
        return "; ".join(parts)
