"""Exceptions that several rooms raise or know.

Owns: their types. Does not own: the exceptions of one room (`weights/errors.py`,
`cluster/errors.py`) or how they are shown (`main.py`). Invariant: each survives pickling.
"""

from __future__ import annotations


class UserCodeError(RuntimeError):
    """Code of the recipe failed; the text holds its traceback, without frames of llamarl."""
