"""What can go wrong between processes. Invariant: importable without Monarch."""

from __future__ import annotations


class RemoteError(RuntimeError):
    """An executor raised something that cannot travel; the text holds its type and traceback."""


class GroupLost(RuntimeError):
    """An executor's process died or fell silent."""
