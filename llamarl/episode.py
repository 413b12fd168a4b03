"""Where the turns of an episode lie in its response.

Owns: that, and a response as people read it. Does not own: the words and records of episodes
(`types.py`), or how ids and text of a turn belong together (`environments/`). Invariant: only token
versions say what the model wrote.
"""

from collections.abc import Callable

import numpy as np

from llamarl.types import NO_VERSION


def turn_start(versions: np.ndarray) -> int:
    """Where the last turn begins in a response of these token versions [T]: after its last
    observation."""
    observed = np.flatnonzero(versions == NO_VERSION)
    return int(observed[-1]) + 1 if len(observed) else 0


def last_turn(ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """What the model wrote last of a response `ids` [T]."""
    return ids[turn_start(versions) :]


def conversation(ids: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str]) -> str:
    """A response [T] as people read it: a line for each turn, and observations in brackets."""
    is_observed = versions == NO_VERSION
    starts = np.flatnonzero(is_observed[1:] != is_observed[:-1]) + 1
    lines = []
    for run, observed in zip(np.split(ids, starts), np.split(is_observed, starts), strict=True):
        text = decode(run)
        lines.append(f"[{text.strip()}]" if observed[:1].any() else text)
    return "\n".join(lines)
