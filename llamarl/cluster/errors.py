"""What can go wrong between processes. Invariant: importable without Monarch, and picklable."""

from __future__ import annotations


class RemoteError(RuntimeError):
    """An executor raised something that cannot travel; the message is its text."""


class GroupLost(RuntimeError):  # noqa: N818 - what happened, as in the log line
    """A process of an executor group died or fell silent.

    `rank` is None where only the group is known, as in a call from one executor to another.
    """

    def __init__(self, group: str, rank: int | None = None, reason: str = "") -> None:
        super().__init__(group, rank, reason)
        self.group = group
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        reason = f": {self.reason}" if self.reason else ""
        return f"lost executor {self.group}{rank}{reason}"
