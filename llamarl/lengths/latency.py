"""How long a decode step takes by the number of rollouts in it.

Owns: the fit. Does not own: where the steps come from (`loop/skew.py`). Invariant: never falls with
the batch size, whatever was measured.

The per-token latency PTL(b) of a rollout in a batch of b is the time of one decode step: slow
growth while weights are read, about linear once arithmetic takes longer. It is the median of the
newest steps of about each size, made to rise by pooling neighbours that fall (isotonic regression),
and linear between the sizes that occurred and beyond them.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

NUM_KEPT = 64  # steps per size
SIZES_PER_DOUBLING = 4


class Latency:
    """PTL(b) in seconds."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}  # by size, in quarters of a doubling
        self._sizes = np.zeros(0)
        self._seconds = np.zeros(0)

    @property
    def is_known(self) -> bool:
        """True once steps of two sizes were measured."""
        return len(self._sizes) > 1

    def fit(self, steps: Iterable[tuple[int, float]]) -> None:
        """Learn from more decode steps: rollouts in it, seconds."""
        for size, seconds in steps:
            if size > 0 and seconds > 0:
                quarter = round(SIZES_PER_DOUBLING * math.log2(size))
                self._steps.setdefault(quarter, deque(maxlen=NUM_KEPT)).append((size, seconds))
        blocks: list[tuple[float, float, int]] = []  # (mean seconds, their weight, sizes pooled)
        sizes = []
        for _, kept in sorted(self._steps.items()):
            sizes.append(float(np.mean([size for size, _ in kept])))
            blocks.append((float(np.median([s for _, s in kept])), float(len(kept)), 1))
            while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
                (one, many, n), (other, more, m) = blocks[-2:]
                blocks[-2:] = [((one * many + other * more) / (many + more), many + more, n + m)]
        self._seconds = np.repeat([s for s, _, _ in blocks], [n for _, _, n in blocks])
        self._sizes = np.array(sizes)

    def __call__(self, size: float) -> float:
        """Seconds of a step with `size` rollouts. ValueError if nothing was measured."""
        if not len(self._sizes):
            raise ValueError("a latency must be fitted before it is asked")
        beyond = size - self._sizes[-1]
        if beyond <= 0 or len(self._sizes) == 1:
            return float(np.interp(size, self._sizes, self._seconds))
        slope = np.ptp(self._seconds) / np.ptp(self._sizes)
        return float(self._seconds[-1] + beyond * slope)
