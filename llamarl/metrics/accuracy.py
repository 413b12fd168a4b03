"""How sure an accuracy is.

Owns: the confidence interval of a share. Does not own: accuracies. Invariant: pure.
"""

import math

Z_95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` samples, within 0 and 1.

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    spread = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2))
    centre, scale = share + Z_95**2 / (2 * count), 1 + Z_95**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def with_interval(share: float, count: int) -> str:
    """Such as "98.4 % of 512 (97.0 to 99.2)"."""
    low, high = interval(share, count)
    return f"{share:.1%} of {count} ({low:.1%} to {high:.1%})"
