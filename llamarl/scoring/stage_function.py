"""The service of a stage's processes: a function of task.py, or the rewards, with a check of its
results. Only finite numbers leave; a column with an entry per response token has as many as there
are tokens, in the range of its dtype."""

import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import numpy as np

from llamarl.core.config import RewardConfig
from llamarl.core.extensions import load_module
from llamarl.core.groups import REASON
from llamarl.core.records import Prompt, StageStatus, read_json
from llamarl.scoring import rewards
from llamarl.scoring.stages import GROUP, Drop, Stage, from_data
from llamarl.scoring.user_code.calls import (
    InvalidReturnError,
    InvalidRewardError,
    as_number,
    awaited,
    shown,
    user_traceback,
)
from llamarl.storage.columns import NUMBER, PROMPT_RECORD, TEXT, Column

Answer = dict[str, Any]


def load(setup: dict[str, Any]) -> Callable[..., Answer | Coroutine[Any, Any, Answer]]:
    """Return the worker's service: (prompt, an argument per name in `reads`, the number of response
    tokens of each rollout) -> the result of `answer`, which runs at once unless one of the
    functions is a coroutine. The argument of "prompt" is ignored. `setup["reward"]` has the reward
    section if the stage is `score`."""
    stage, source = from_data(setup["stage"]), setup["task_source"]
    function: Callable[..., Any]
    if setup["reward"] is None:
        assert isinstance(stage.run, str)
        function = getattr(load_module(source), stage.run)
        is_coroutine = inspect.iscoroutinefunction(function)
    else:
        config = read_json(RewardConfig, setup["reward"])
        functions = rewards.load_functions(config, source)
        function = rewards.make_score(functions, config)
        is_coroutine = any(map(inspect.iscoroutinefunction, functions.values()))

    async def serve(prompt: Prompt | None, columns: list[Any], lengths: list[int]) -> Answer:
        return await answer(function, stage, prompt, columns, lengths)

    return serve if is_coroutine else lambda *arguments: run_now(serve(*arguments))


def run_now(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine that never waits, and return its result, without an event loop: functions may
    want to run one themselves."""
    try:
        coroutine.send(None)
        coroutine.throw(InvalidReturnError("be awaited in an `async def` of task.py"))
    except StopIteration as end:
        found: Answer = end.value
        return found
    raise AssertionError("it ends with what it is thrown")


async def answer(
    function: Callable[..., Any],
    stage: Stage,
    prompt: Prompt | None,
    columns: Sequence[Any],
    lengths: Sequence[int],
) -> Answer:
    """Call the function. Returns {"rows": [...]} with the reason to drop it, or a list of its
    values by written column, per rollout; after a failure {"status": str, "error": str}."""
    is_group = stage.per == GROUP
    record = [prompt] * len(lengths) if is_group else prompt
    pairs = zip(stage.reads, columns, strict=True)
    arguments = [record if name == PROMPT_RECORD else column for name, column in pairs]
    try:
        found = await awaited(function(*arguments))
        if is_group:
            rows = _group_rows(found, stage, lengths)
        else:
            rows = [_row(_by_column(found, stage), stage, lengths[0])]
    except InvalidRewardError as error:
        return {"status": StageStatus.INVALID, "error": str(error)}
    except InvalidReturnError as error:
        why = f"what stage {stage.name} returns must {error}"
        return {"status": StageStatus.INVALID, "error": why}
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        why = f"{stage.name}: {user_traceback(error)}"
        return {"status": StageStatus.RAISED, "error": why}
    return {"rows": rows}


def _group_rows(found: Any, stage: Stage, lengths: Sequence[int]) -> list[str | list[Any]]:
    if isinstance(found, Drop) or (found is None and not stage.writes):
        return [_row((found,), stage, length) for length in lengths]
    lists = []
    for value in _by_column(found, stage):
        entries = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(entries, list | tuple) or len(entries) != len(lengths):
            _refuse(f"have one entry per rollout ({len(lengths)})", value)
        lists.append(entries)
    rows = zip(zip(*lists, strict=True), lengths, strict=True)
    return [_row(values, stage, length) for values, length in rows]


def _by_column(found: Any, stage: Stage) -> Sequence[Any]:
    """Return the values of each written column; one entry if none is written, or for a Drop."""
    if len(stage.writes) < 2 or isinstance(found, Drop):
        return (found,)
    if not isinstance(found, tuple) or len(found) != len(stage.writes):
        names = ", ".join(column.name for column in stage.writes)
        _refuse(f"be a tuple with an entry for each of {names}", found)
    return found


def _row(values: Sequence[Any], stage: Stage, length: int) -> str | list[Any]:
    """Return the reason of a rollout's Drop, or the values to store for it."""
    for value in values:
        if isinstance(value, Drop):
            if not (isinstance(value.reason, str) and REASON.fullmatch(value.reason)):
                _refuse("drop for a reason of up to 40 small letters, digits and _", value)
            return value.reason
        if value is not None and not stage.writes:
            _refuse("be None or a Drop, for the stage writes nothing", value)
    pairs = zip(values, stage.writes, strict=False)
    return [_checked(value, column, length) for value, column in pairs]


def _checked(value: Any, column: Column, length: int) -> Any:
    if column.length == TEXT:  # of the rewards, which make it themselves
        return str(value)
    if column.length != NUMBER:
        return _entries(value, column, length)
    number = as_number(value)
    if number is None or not math.isfinite(number):
        _refuse(f"be a finite number for {column.name}", value)
    return number


def _entries(value: Any, column: Column, length: int) -> list[float] | list[int]:
    """Return the values of a column with an entry per response token. NaN and infinity are allowed,
    for the loss to handle."""
    must = f"be {length} numbers for {column.name}, one per response token"
    try:
        given = np.asarray(value)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, and the like
        _refuse(must, value)
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        _refuse(must, value)
    if len(given) != length:
        raise InvalidReturnError(f"{must}, got {len(given)}")
    with np.errstate(all="ignore"):
        cell = given.astype(column.dtype)
    if cell.dtype.kind == "i":
        fits = np.array_equal(cell, given)
    else:
        fits = np.array_equal(np.isfinite(cell), np.isfinite(given))
    if not fits:
        _refuse(f"be numbers of {column.dtype} for {column.name}", value)
    return cell.tolist()


def _refuse(must: str, got: Any) -> NoReturn:
    raise InvalidReturnError(f"{must}, got {shown(got)}")
