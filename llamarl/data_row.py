"""Data rows: what a recipe's names of fields find in them.

Owns: how a name is read. Does not own: which names a recipe has (`config/`), or files of rows
(`environments/`). Invariant: a row's own key comes before every other meaning of a name.
"""

from collections.abc import Mapping
from typing import Any

FALLBACKS = {"question": "prompt", "answer": "reward_model.ground_truth"}
"""Where TRL's and verl's rows have what the default names of fields stand for."""


def value_at(row: Mapping[str, Any], field: str) -> Any:
    """What a data row has in a field: `a.b` is `b` of the object in `a`, unless the row has a key
    of that whole name; `question` and `answer` may also stand where `FALLBACKS` say. KeyError, with
    the last name looked for, if the row lacks it."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            if field in FALLBACKS:
                return value_at(row, FALLBACKS[field])
            raise KeyError(field)
        value = value[name]
    return value


def find_value(row: Mapping[str, Any], field: str) -> Any:
    """The same; None if the row lacks it."""
    try:
        return value_at(row, field)
    except KeyError:
        return None
