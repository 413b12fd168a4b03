"""What may go wrong in several rooms alike. Invariant: every exception here survives pickling."""

from __future__ import annotations


class UserCodeError(RuntimeError):
    """Code of the recipe failed; the text holds its own traceback, and our frames say no more."""
