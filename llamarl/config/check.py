"""The two checks that every config section uses. Invariant: a failed check names the key, what it
must be and what it got, in one line."""

from __future__ import annotations

from collections.abc import Iterable


def require(condition: bool, key: str, must: str, got: object) -> None:
    """Raise ValueError "`key` must `must`, got `got`" unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {must}, got {got!r}")


def require_choice(key: str, got: object, choices: Iterable[object]) -> None:
    """Raise ValueError unless `got` is one of `choices`."""
    allowed = tuple(choices)
    require(got in allowed, key, "be one of " + ", ".join(str(c) for c in allowed), got)
