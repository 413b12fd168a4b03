"""Prompts that a recipe's own task.py makes.

    def prompts(held_out, size=1000):      # the rest by name: what `data.options` holds
        yield {"question": ..., "answer": ...}

Owns: asking for their rows, in a process of its own, and what rows may hold. Does not own: their
tokens (`prompts.py`), or what the options mean. Invariant: the text runs in a process that is gone
afterwards, in which sets of texts have the same order at each start: a resumed run that asks again
gets the same rows.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from llamarl.task_file import FILE, find, load_module, where
from llamarl.task_neighbours import TaskSource
from llamarl.user_code.calls import Call, UserCode, shown
from llamarl.user_code.pool import run_once

NAME = "prompts"
KEY = "data.options"
LIMIT_S = 3600.0
MAX_BYTES = 2**34  # of all rows, as JSON


def make_rows(
    source: TaskSource, options: Mapping[str, Any], *, held_out: bool
) -> list[dict[str, Any]]:
    """The rows that `prompts` in this task.py makes of these options.

    ValueError, in one line, if the text does not load, the options are not what the function takes,
    it raises (of a ValueError the text alone is shown, for it is about the options), or a row is no
    dictionary of what JSON can hold.
    """
    setup = {"task_source": source}
    code = UserCode(service=__name__, setup=setup, timeout_s=LIMIT_S, label=FILE, keys="a fixed ")
    answer = run_once(code, Call(None, (held_out, dict(options)), MAX_BYTES))
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def load(setup: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The service of the worker: (held_out, options) -> {"rows": [row, ...]} or {"mistake": one
    line}."""
    function = find(load_module(setup["task_source"]), NAME)

    def make(_: None, held_out: bool, options: dict[str, Any]) -> dict[str, Any]:
        try:
            inspect.signature(function).bind(held_out, **options)
        except TypeError as error:
            takes = f"{KEY} must be what {NAME}{inspect.signature(function)} takes"
            return {"mistake": f"{FILE}: {takes}, got {options}: {error}"}
        try:
            rows = [*function(held_out, **options)]
        except ValueError as error:
            return {"mistake": f"{FILE}: {' '.join(str(error).split())}"}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            return {"mistake": f"{NAME} of {FILE} must not raise, got {where(error)}"}
        for number, row in enumerate(rows, start=1):
            if why := _not_json(row):
                return {"mistake": f"{FILE}: {NAME}:{number}: the row must {why}"}
        return {"rows": rows}

    return make


def _not_json(row: object) -> str:
    """What the row must be instead; empty if it is well."""
    if not isinstance(row, dict):
        return f"be a dictionary, got {shown(row)}"
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"hold what JSON can, got {shown(row)}: {error}"
    return ""
