"""The base class of config sections with its checks, and the limits and choices of fields."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

HOUR_S, DAY_S = 3600.0, 86400.0
Limits = Mapping[str, Any]
"""The limits of a value: a number is `least` or more, `above` and not equal, `most` or less; a text
is one of `choices`."""


def number(default: float, **limits: float) -> Any:
    """Return a dataclass field with this default and limits; a subclass with another default keeps
    the limits."""
    assert limits.keys() in ({"least", "most"}, {"above", "most"}), "a number has two limits"
    return dataclasses.field(default=default, metadata=limits)


def choice(default: str, *others: str) -> Any:
    """Return a dataclass field that is one of these texts."""
    return choice_of((default, *others))


def choice_of(choices: Sequence[str]) -> Any:
    """Return a dataclass field that is one of these texts; the first is the default, and more may
    be added to the sequence later."""
    return dataclasses.field(default=choices[0], metadata={"choices": choices})


class Section:
    """A dataclass of fields that check themselves, with a check of the rules between fields.

    `key` names it in a recipe: "data" for DataConfig and what inherits from it, "" for the root, or
    what the class itself says.
    """

    key = ""

    def __init_subclass__(cls) -> None:
        if Section in cls.__bases__ and "key" not in vars(cls):
            cls.key = cls.__name__.removesuffix("Config").lower()

    def __post_init__(self) -> None:
        check_fields(self.key, self)
        self.check()

    def check(self) -> None:
        """Raise ValueError unless the fields go together."""

    def require(self, condition: bool, name: str, must: str) -> None:
        """Raise ValueError "`name` must `must`, got its value" unless `condition` holds; `name` is
        a field of this section, or one of a section in it, such as "trainer.lr"."""
        if not condition:
            require(False, f"{self.key}.{name}".lstrip("."), must, attrgetter(name)(self))


def limits_of(section: type, name: str) -> Limits:
    """Return the limits of the field `name` of this config class; empty if it has none."""
    fields = [getattr(each, "__dataclass_fields__", {}).get(name) for each in section.__mro__]
    return next((field.metadata for field in fields if field and field.metadata), {})


def broken(limits: Limits, value: object) -> str | None:
    """Return the rule that a number breaks, in words, or None if it lies within the limits, or is
    no number."""
    if not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return "be a finite number"
    if value < limits.get("least", -math.inf):
        return f"be at least {limits['least']}"
    if value <= limits.get("above", -math.inf):
        return f"be above {limits['above']}"
    if value > limits.get("most", math.inf):
        return f"be at most {limits['most']}"
    return None


def check_fields(section: str, config: Any) -> None:
    """Raise ValueError unless every field of the dataclass `config` makes sense by itself.

    A number must lie within its limits, or be finite where it has none; a text must be one of its
    choices, not be empty unless that is its default, and be one that files can hold. A list must
    hold such values. `section` is the key of `config` in a recipe, "" for the root.
    """
    for field in dataclasses.fields(config):
        key = f"{section}.{field.name}".lstrip(".")
        value = getattr(config, field.name)
        limits = limits_of(type(config), field.name)
        is_list = isinstance(value, list)
        for each in value if is_list else [value]:
            # OmegaConf lets sections, lists and null stand in a list of any type.
            is_one = not is_list or isinstance(each, str | int | float)
            require(is_one, key, "hold texts or numbers", value)
            if isinstance(each, str):
                require(bool(each) or field.default == "", key, "not be empty", value)
                require(_can_be_written(each), key, "be text without null characters", value)
                require_choice(key, each, limits.get("choices", (each,)))
            must = broken(limits, each)
            require(must is None, key, must or "", value)


def _can_be_written(text: str) -> bool:
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in text)
    return is_unicode and "\0" not in text


def require(condition: bool, key: str, must: str, got: object) -> None:
    """Raise ValueError "`key` must `must`, got `got`" unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {must}, got {got!r}")


def require_choice(key: str, got: object, choices: Iterable[object]) -> None:
    """Raise ValueError, with the choice that may be meant, unless `got` is one of `choices`."""
    allowed = tuple(choices)
    if got not in allowed:
        raise ValueError(wrong_choice(key, got, map(str, allowed)))


def wrong_choice(key: str, got: object, choices: Iterable[str]) -> str:
    """Return the line about a `got` that is none of `choices`, with the one that may be meant."""
    names = [*choices]
    meant = did_you_mean(difflib.get_close_matches(str(got), names, n=1))
    return f"{key} must be one of {', '.join(names)}, got {got!r}{meant}"


def did_you_mean(names: list[str]) -> str:
    """Return `` (did you mean a or b?)``, or nothing without names."""
    return f" (did you mean {' or '.join(names)}?)" if names else ""
