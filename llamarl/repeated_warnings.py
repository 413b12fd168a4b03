"""Warnings that a run may repeat with every step.

Owns: which repetitions are written. Does not own: when something is worth a warning, or where lines
go. Invariant: n repetitions of a warning are at most 1 + log10(n) lines.
"""

import logging
from collections import Counter
from collections.abc import Hashable


class RepeatedWarnings:
    """Writes a warning the first, tenth, hundredth ... time that it comes, from then on with the
    number of times."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[Hashable] = Counter()

    def warn(self, words: str, *args: object, about: Hashable = None) -> None:
        """Warn of `words` % `args`. The same words are one warning, whatever the arguments are, if
        they are `about` the same."""
        self._counts[words, about] += 1
        count = self._counts[words, about]
        if count == 10 ** (len(str(count)) - 1):
            times = f" ({count:,} times so far)" if count > 1 else ""
            self._log.warning(words + times, *args)
