"""The checks that config sections use, the limits beside a field's default, and a device's dtype.

Owns: what a number or a text may be. Does not own: rules between fields, which their section holds.
Invariant: a failed check names the key, what it must be and what it got, in one line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

DAY_S = 86400.0
Limits = Mapping[str, float]
"""What a number must be: `least` or more, `above` and not equal, `most` or less."""


def number(default: float, **limits: float) -> Any:
    """A dataclass field with this default and these limits, which `check_fields` keeps.

    A subclass that only has another default inherits the limits.
    """
    assert limits.keys() in ({"least", "most"}, {"above", "most"}), "a number has two limits"
    return dataclasses.field(default=default, metadata=limits)


def limits_of(section: type, name: str) -> Limits:
    """The limits of the field `name` of this config class; none if it is no number."""
    fields = [getattr(each, "__dataclass_fields__", {}).get(name) for each in section.__mro__]
    return next((field.metadata for field in fields if field and field.metadata), {})


def broken(limits: Limits, value: float) -> str | None:
    """What `value` must be instead, or None if it lies within the limits."""
    if not math.isfinite(value):
        return "be a finite number"
    if "least" in limits and value < limits["least"]:
        return f"be at least {limits['least']}"
    if "above" in limits and value <= limits["above"]:
        return f"be above {limits['above']}"
    if "most" in limits and value > limits["most"]:
        return f"be at most {limits['most']}"
    return None


def check_fields(section: str, config: Any) -> None:
    """ValueError unless every field of the dataclass `config` makes sense by itself.

    A number must lie within its limits, or be finite where it has none; a text must not be empty,
    unless that is its default, and must be one that files can hold. `section` is the key of
    `config` in a recipe, "" for the root.
    """
    for field in dataclasses.fields(config):
        key = f"{section}.{field.name}".lstrip(".")
        value = getattr(config, field.name)
        limits = limits_of(type(config), field.name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float):
                must = broken(limits, each)
                require(must is None, key, must or "", value)
            elif isinstance(each, str):
                require(bool(each) or field.default == "", key, "not be empty", value)
                require(_can_be_written(each), key, "be text without null characters", value)


def _can_be_written(text: str) -> bool:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in text)
    return is_unicode and "\0" not in text


def require(condition: bool, key: str, must: str, got: object) -> None:
    """Raise ValueError "`key` must `must`, got `got`" unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {must}, got {got!r}")


def require_choice(key: str, got: object, choices: Iterable[object]) -> None:
    """Raise ValueError unless `got` is one of `choices`."""
    allowed = tuple(choices)
    require(got in allowed, key, "be one of " + ", ".join(str(c) for c in allowed), got)


def dtype_for(device: str, dtype: str) -> str:
    """`dtype`, or instead of "auto" what `device` computes best in: cpu | cuda."""
    return {"cpu": "float32", "cuda": "bfloat16"}[device] if dtype == "auto" else dtype
