"""How far a forecast may be off, in words.

Owns: bands made from the errors against public measurements. Does not own: the errors
(`efficiency.py`). Invariant: a band is s / (1 + error) to s * (1 + error); what no measurement
confirms gets none, and says so.
"""

from llamarl.planner.efficiency import ERRORS

NO_BAND = "no band for a publish: no public measurement of one states its layout"


def band(kind: str, seconds: float) -> tuple[float, float]:
    """The shortest and longest that public measurements let expect of a "trainer", a "generator",
    or a "step", which is off by no more than the worse of both."""
    error = max(ERRORS.values()) if kind == "step" else ERRORS[kind]
    return seconds / (1 + error), seconds * (1 + error)


def band_words(kind: str, seconds: float, what: str) -> str:
    """One line."""
    low_s, high_s = band(kind, seconds)
    error = high_s / seconds - 1
    return (
        f"band: {what} takes {low_s:.3g} to {high_s:.3g} s; public measurements are up to "
        f"{error:.0%} off this law's forecasts"
    )
